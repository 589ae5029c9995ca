"""What programs import: `from tenantry import Client`."""

from services.cli.client import Client, ClientError

__all__ = ["Client", "ClientError"]
