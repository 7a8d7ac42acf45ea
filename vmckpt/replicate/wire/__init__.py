"""What primary and standby say to one another, as bytes; knows no sockets, files or asyncio."""
