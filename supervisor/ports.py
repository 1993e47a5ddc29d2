"""Ports of a mesh: each is checked before anything starts, and none is taken twice."""

from sluice.errors import SetupError
from sluice.startup import LOOPBACK, free_port, is_loopback, listen_problem, split_address


class Ports:
    """The ports that are taken so far. Methods raise SetupError for one that cannot be; `key` names the setting."""

    def __init__(self) -> None:
        self._used_ports: set[int] = set()

    def take(self, key: str, host: str, port: int) -> int:
        """Take `port`, or a free port for 0, and return it."""
        if port == 0:
            port = free_port(host, self._used_ports)
        elif problem := listen_problem(host, port):
            raise SetupError(f"{key}: {host}:{port} is {problem}; free it or choose another one")
        elif port in self._used_ports:
            raise SetupError(
                f"{key}: port {port} is another server's of this mesh already; choose another"
            )
        self._used_ports.add(port)
        return port

    def addresses(self, key: str, address: str, count: int) -> list[str]:
        """Return addresses of `count` servers: consecutive ports from that of `address`, or free ones where it is 0."""
        host, first = split_address(address, key)
        url_host = f"[{host}]" if ":" in host else host
        ports = (self.take(key, host, first and first + number) for number in range(count))
        return [f"{url_host}:{port}" for port in ports]

    def own(self, key: str, address: str, count: int) -> list[str]:
        """Return addresses on loopback, as `addresses` does, for servers without credentials."""
        host, _ = split_address(address, key)
        if not is_loopback(host):
            raise SetupError(
                f"{key}: {host} can be reached from other machines and there are no "
                f"credentials; use {LOOPBACK}"
            )
        return self.addresses(key, address, count)

    def pages(self, process: str, address: str | None, count: int = 1) -> list[str | None]:
        """Return where `count` processes of a kind have their metrics; without `address` nowhere."""
        if address is None:
            return [None] * count
        return [*self.own(f"telemetry.prometheus.{process}", address, count)]
