"""The protocol between primary and standby, as bytes: no sockets, files or asyncio."""
