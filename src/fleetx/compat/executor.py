"""The executor of the guide: ours, which also takes Paddle's names in a fetch list."""

from collections.abc import Mapping, Sequence
from typing import Any

from fleetx import static
from fleetx.compat.names import translate
from fleetx.static.fetching import as_list


class Executor(static.Executor):
    """Runs programs on one device; see `fleetx.static.Executor`."""

    def run(
        self,
        program: static.Program | static.StartupProgram | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Any] = (),
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run a program once. Fetch by Paddle's names or ours; what Paddle calls a variable may be an output here."""
        wanted = [translate(want) if isinstance(want, str) else want for want in as_list(fetch_list)]
        return super().run(program, feed, wanted, return_numpy)
