"""Run code in a fresh Python process and read its answer.

What a test asks about a whole process (what is imported, the peak of its memory, whether it ends)
cannot be asked in the process of the test runner, which has imported and allocated long before.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child: this one, and the package importable from HERE."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    absolute = [os.path.abspath(path) for path in (*paths, ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(absolute), **(extra or {})}


def command(function: str, *arguments: Any) -> list[str]:
    """Return the command that calls ``"module.function"`` and prints its answer as JSON.

    The arguments travel as JSON too.
    """
    module, name = function.rsplit(".", 1)
    call = f"{module}.{name}(*json.loads({json.dumps(arguments)!r}))"
    code = f"import json, {module}; print(json.dumps({call}), flush=True)"
    return [sys.executable, "-c", code]


def answer(
    function: str, *arguments: Any, timeout: float, env: Mapping[str, str] | None = None
) -> Any:
    """Call a function of a module of this directory in a fresh process; return what it returns.

    The process must exit with status 0 within `timeout` seconds; what it printed last is the
    answer.
    """
    result = subprocess.run(
        command(function, *arguments),
        cwd=HERE,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])
