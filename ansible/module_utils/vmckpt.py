"""What the modules of vmckpt share: they run the command, and go by its exit code and its JSON."""

import json

# Options of every module.
COMMON = {
    "command": {"type": "str", "default": "vmckpt"},
    "state_dir": {"type": "path"},
}
OFF = ("stopped", "crashed", "nostate")


class Vmckpt:
    """vmckpt on the machine where the module runs: the operator's."""

    def __init__(self, module):
        self._module = module
        state_dir = module.params["state_dir"]
        self._environment = {"VMCKPT_STATE_DIR": state_dir} if state_dir else {}

    def run(self, *words):
        """The exit code and the result of a command; `--json` has to be among its words."""
        argv = [self._module.params["command"], *words]
        code, out, said = self._module.run_command(argv, environ_update=self._environment)
        try:
            result = json.loads(out)
        except ValueError:
            result = None
        if not isinstance(result, dict):
            self._module.fail_json(
                msg=f"vmckpt gives no result: {said.strip() or f'exit code {code}'}",
                cmd=argv,
                rc=code,
            )
        return code, result

    def must(self, *words):
        """The result of a command that has to end well; else the module fails."""
        code, result = self.run(*words)
        if code:
            self.fail(code, result)
        return result

    def fail(self, code, result, **facts):
        """End the module with vmckpt's own words."""
        error = result.get("error") or {}
        words = [error[name] for name in ("what", "why", "remedy") if error.get(name)]
        self._module.fail_json(
            msg="; ".join(words) or f"vmckpt ended with exit code {code}",
            rc=code,
            kind=error.get("kind"),
            result=result,
            **facts,
        )

    def show(self, vm):
        """The VM, as `vmckpt vm show` has it."""
        return self.must("vm", "show", vm, "--json")


def flags(params, names):
    """The options of `names` that are set, as words: `max_pause` is --max-pause."""
    words = []
    for name in names:
        value = params[name]
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                words += ["--" + name.replace("_", "-"), str(one)]
    return words
