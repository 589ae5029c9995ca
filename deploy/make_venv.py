"""Makes .venv with everything pinned by constraints/*.txt, telling what it does; a second run with nothing changed is immediate.

Runs before anything is installed, perhaps under a Python that is too old: standard library only, and no syntax newer than 3.7.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "install.log"
STAMP = VENV / "installed.sha256"
NEEDED_BYTES = 4_000_000_000
SIZE = "about 3 GB, minutes"
CONSTRAINTS = [ROOT / "constraints" / (group + ".txt") for group in ("base", "cpu", "dev")]
ANSWERS = [
    (r"No space left on device", "free some disk space and run it again"),
    (
        r"NewConnectionError|ConnectTimeout|ReadTimeout|Max retries|name resolution|ProxyError|Connection reset|Network is unreachable",
        "the package registry cannot be reached: check the network or proxy and run it again (finished downloads are kept)",
    ),
    (r"SSLError|CERTIFICATE_VERIFY", "the registry's certificate is not trusted here: set PIP_CERT to your CA file and run it again"),
    (
        r"No matching distribution|Could not find a version|not a supported wheel",
        "the registry that pip uses lacks it for this machine: see `pip config list`; Linux x86_64 with Python 3.11 is what is pinned",
    ),
    (r"Permission denied", "the folder cannot be written: check its owner and run it again"),
]


class Failed(Exception):
    """One line: what failed and what to do."""


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def check_machine():
    if sys.version_info[:2] != (3, 11):
        have = ".".join(str(part) for part in sys.version_info[:3])
        raise Failed(f"Python 3.11 is needed and this is {have}: install it, or name it with `make PYTHON=/path/to/python3.11 ...`")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise Failed("this Python lacks the venv module: install it (Debian and Ubuntu: apt-get install python3.11-venv)") from None
    free = shutil.disk_usage(str(ROOT)).free
    have = sum(file.stat().st_size for file in VENV.glob("lib/python3.11/site-packages/torch/lib/*.so"))  # half done before
    if free + have * 5 < NEEDED_BYTES:
        short = f"{free / 1e9:.1f} GB are free under {ROOT} and about {NEEDED_BYTES / 1e9:.0f} GB are needed"
        raise Failed(f"{short}: free some, or clone onto a bigger disk")


def fingerprint():
    """Changes whenever the installation would."""
    digest = hashlib.sha256((sys.version + str(ROOT)).encode())
    for file in [*CONSTRAINTS, ROOT / "pyproject.toml", ROOT / "kernels" / "pyproject.toml", Path(__file__)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def pins():
    lines = [line.strip() for file in CONSTRAINTS for line in file.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def pin(name):
    return next(line for line in pins() if line.startswith(name + "=="))


class Step:
    """One line of the display: `[2/5] title  how far  seconds`."""

    def __init__(self, number, total, title):
        self.head = f"[{number}/{total}] {title}"
        self.started = time.monotonic()
        self.shown = 0.0
        self.live = sys.stdout.isatty()

    def show(self, how_far, end=False):
        now = time.monotonic()
        every = 0.2 if self.live else 10.0
        if not end and now - self.shown < every:
            return
        self.shown = now
        line = f"{self.head:<34} {how_far[:48]:<48} {now - self.started:>4.0f} s"
        if self.live:
            sys.stdout.write("\r" + line + ("\n" if end else ""))
            sys.stdout.flush()
        else:
            say(line)


def run(step, command, expected=0, allowed=(0,)):
    """Runs it to its end with its output in the log; returns the output's lines.

    `expected`: packages it will install. `allowed`: exit codes (compileall's is 1 for a template that is no Python).

    :raises subprocess.CalledProcessError: it failed.
    """
    packages = VENV / "lib" / "python3.11" / "site-packages"
    lines, met, name, unpacking = [], 0, "", False
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PYTHONUNBUFFERED="1")
    with LOG.open("a") as log:
        log.write("$ " + " ".join(command) + "\n")
        process = subprocess.Popen(
            command, cwd=str(ROOT), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            assert process.stdout is not None
            selector = selectors.DefaultSelector()
            selector.register(process.stdout, selectors.EVENT_READ)
            rest = b""
            while True:
                if selector.select(timeout=0.3):
                    piece = os.read(process.stdout.fileno(), 65536)
                    if not piece:
                        break
                    *whole, rest = (rest + piece).split(b"\n")
                    for raw in whole:
                        line = raw.decode(errors="replace").rstrip()
                        lines.append(line)
                        log.write(line + "\n")
                        found = re.match(r"(?:Collecting|Requirement already satisfied:|Processing) ([^ (]+)", line)
                        if found:
                            met, name = met + 1, found.group(1).rsplit("/", 1)[-1]
                        unpacking = unpacking or line.startswith("Installing collected packages")
                if unpacking and expected > 1:
                    done = min(len(list(packages.glob("*.dist-info"))), expected)
                    step.show(f"unpacked {done} of {expected}")
                elif expected > 1:
                    step.show(f"fetched {min(met, expected)} of {expected}: {name}")
                else:
                    step.show(name)
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code not in allowed:
        raise subprocess.CalledProcessError(code, command, "\n".join(lines))
    return lines


def pip(*arguments):
    return [str(VENV / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off", "--no-compile", *arguments]


def install_torch(step):
    """The CPU build where the registry has one, else the general one, which is bigger and works too."""
    try:
        run(step, pip("--no-deps", pin("torch") + "+cpu"))
    except subprocess.CalledProcessError as error:
        if "No matching distribution" not in (error.output or ""):
            raise
        constrained = [argument for file in CONSTRAINTS for argument in ("-c", str(file))]
        run(step, pip(*constrained, pin("torch")), expected=30)
        return "no CPU-only build in this registry: the general one"
    return "CPU build"


def install():
    requirements = [argument for file in CONSTRAINTS for argument in ("-r", str(file))]
    count = len(pins())

    def make(step):
        run(step, [sys.executable, "-m", "venv", str(VENV)])
        return ".venv, Python {}.{}.{}".format(*sys.version_info[:3])

    def upgrade_pip(step):
        run(step, pip(pin("pip"), pin("setuptools")))
        return pin("pip") + ", " + pin("setuptools")

    def packages(step):
        run(step, pip("--no-deps", *requirements), expected=count)
        return f"{count} pinned packages"

    def compile_all(step):
        """On every core, where pip would use one; and also where the environment forbids doing it at the first import."""
        run(step, [str(VENV / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", "-x", "/tests?/", str(VENV / "lib")], allowed=(0, 1))
        return "byte code, on every core"

    def own(step):
        run(step, pip("--no-deps", "--no-build-isolation", "-e", "./kernels", "-e", "."))
        return "tenantry and lora-kernels, editable"

    steps = [("environment", make), ("pip", upgrade_pip), ("torch", install_torch), ("packages", packages)]
    steps += [("byte code", compile_all), ("this project", own)]
    for number, (title, action) in enumerate(steps, 1):
        step = Step(number, len(steps), title)
        try:
            step.show(action(step), end=True)
        except subprocess.CalledProcessError as error:
            step.show("failed", end=True)
            raise Failed(explain(title, error.output or "")) from error


def explain(title, output):
    """The line for people: the program's own error, and what to do about it."""
    lines = output.splitlines()
    errors = [line for line in lines if line.startswith("ERROR") or "No space left" in line] or lines[-1:] or ["no output"]
    answer = next((answer for pattern, answer in ANSWERS if re.search(pattern, output)), "the log says more")
    return f"step `{title}` failed: {errors[-1][:200]}; {answer}. Log: {LOG}"


def main():
    if STAMP.exists() and sys.version_info[:2] == (3, 11) and STAMP.read_text() == fingerprint():
        return 0
    started = time.monotonic()
    try:
        check_machine()
        VENV.mkdir(exist_ok=True)
        with (VENV / "install.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                say(f"waiting for another installation into {VENV.name} ...")
                fcntl.flock(lock, fcntl.LOCK_EX)
            wanted = fingerprint()
            if STAMP.exists() and STAMP.read_text() == wanted:
                return 0
            say(f"Installing into {VENV.name} ({SIZE}; later runs skip this). Log: {LOG}")
            if STAMP.exists():
                STAMP.unlink()
            install()
            STAMP.write_text(wanted)
    except Failed as error:
        sys.stderr.write(f"make venv: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"make venv: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nmake venv: stopped; run it again to go on\n")
        return 128 + signal.SIGINT
    say(f"Installed in {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
