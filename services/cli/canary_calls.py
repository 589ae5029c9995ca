"""The Python client's part about trials."""

from pathlib import Path

import httpx

from services.cli.admin_http import AdminHttp, Progress, present
from shared.contracts.admin import AdapterView, CanaryView

_PPM = 1_000_000


class CanaryCalls(AdminHttp):
    """Shares are parts of 1: 0.1 is every tenth request."""

    def canaries(self, tenant: str = "") -> list[CanaryView]:
        """Trials that run or were stopped. With `tenant` its own key with the scope `adapters` may ask too."""
        return self._get(f"/canaries/{tenant}" if tenant else "/canaries", list[CanaryView])

    def canary(self, name: str, tenant: str) -> CanaryView:
        return self._get(f"/canaries/{tenant}/{name}", CanaryView)

    def start_canary(
        self,
        tenant: str,
        name: str,
        path: str | Path | None = None,
        *,
        share: float = 0.0,
        by: str = "request",
        version: int = 0,
        base: str = "",
        wait_s: float = 120.0,
        progress: Progress | None = None,
        **stop: float,
    ) -> AdapterView:
        """Mounts a version beside the one that serves `name`, and sends it a share of the requests.

        Without `path` a stored version that is at rest goes on trial: `version`, or the newest. `by`: request, session or header.
        `stop`: window_s, min_requests, error_rate_margin, latency_ratio.
        """
        params = present(share_ppm=round(share * _PPM), by=by, version=version or "", base=base, wait_s=wait_s, **stop)
        url = f"/canaries/{tenant}/{name}"
        if path is not None:
            return self._send_archive(url, Path(path), params, wait_s, AdapterView, progress)
        return self._send("POST", url, AdapterView, params=params, timeout=httpx.Timeout(wait_s + 60.0, connect=5.0))

    def change_canary(
        self, name: str, tenant: str, *, share: float | None = None, by: str | None = None, resume: bool = False, **stop: float
    ) -> CanaryView:
        """What is not named stays. `resume` lets a trial that was stopped run again."""
        body = {"share_ppm": None if share is None else round(share * _PPM), "by": by, "stop": stop, "resume": resume}
        return self._send("PATCH", f"/canaries/{tenant}/{name}", CanaryView, json=body)

    def promote_canary(
        self, name: str, tenant: str, *, version: int = 0, deadline_s: float = 300.0, on_deadline: str = "wait"
    ) -> CanaryView:  # fmt: skip
        """The alias becomes the trial version's, and the one that served drains. The answer is the trial as it was."""
        body = {"version": version, "deadline_s": deadline_s, "on_deadline": on_deadline}
        return self._send("POST", f"/canaries/{tenant}/{name}/promote", CanaryView, json=body)

    def roll_back_canary(
        self, name: str, tenant: str, *, version: int = 0, deadline_s: float = 300.0, on_deadline: str = "wait"
    ) -> CanaryView:  # fmt: skip
        """The trial is over and its version drains."""
        body = {"version": version, "deadline_s": deadline_s, "on_deadline": on_deadline}
        return self._send("POST", f"/canaries/{tenant}/{name}/rollback", CanaryView, json=body)
