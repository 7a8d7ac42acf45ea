#!/usr/bin/python
"""An Ansible module: run a risky command with a tested rollback of a VM."""

DOCUMENTATION = r"""
module: vmckpt_guard
short_description: Run a command with a tested checkpoint before it, and a rollback if it fails
description:
  - C(vmckpt guard) takes a checkpoint, proves it, runs the command, watches the VM, and rolls it back on failure.
  - The command runs each time, like that of M(ansible.builtin.command).
  - Runs on the operator's machine, C(delegate_to) it.
attributes:
  check_mode: {support: partial, description: "The VM has to run; the command is not run."}
options:
  vm: {description: "The VM's name.", type: str, required: true}
  argv: {description: "The command and its arguments.", type: list, elements: str, required: true}
  run_in: {description: "Where it runs: the operator's machine, the VM's host, or the guest.", type: str, choices: [here, host, guest], default: here}
  check: {description: "Health checks: C(agent), C(tcp:PORT), a URL, or a command.", type: list, elements: str, default: []}
  address: {description: "The guest's address, for C(tcp:PORT).", type: str}
  watch: {description: "How long to watch the VM after the command, e.g. C(10m).", type: str}
  every: {description: "Interval between checks.", type: str}
  failures: {description: "Number of consecutive failed checks that count as failure.", type: int}
  timeout: {description: "Time limit of the command.", type: str}
  proof: {description: "How to prove the checkpoint.", type: str, choices: [run, read]}
  keep: {description: "How long to keep the checkpoint afterwards, e.g. C(24h).", type: str}
  after_rollback: {description: "Commands to run after a rollback.", type: list, elements: str, default: []}
  max_pause: {description: "Maximum pause of the guest.", type: str}
  store: {description: "Store of the checkpoint.", type: str}
  command: {description: "vmckpt on the machine where the module runs.", type: str, default: vmckpt}
  state_dir: {description: "VMCKPT_STATE_DIR there.", type: path}
"""
EXAMPLES = r"""
- name: Upgrade, or go back
  vmckpt_guard:
    vm: web
    argv: [ansible-playbook, upgrade.yml]
    check: ["http://192.0.2.7/health"]
    watch: 10m
  delegate_to: localhost
"""
RETURN = r"""
result: {description: "What vmckpt says about the guard.", returned: without check mode, type: dict}
rolled_back: {description: "Whether the VM was rolled back.", returned: failure of a guard, type: bool}
open: {description: "Whether the guard is still open: commit it or roll it back.", returned: failure of a guard, type: bool}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.vmckpt import COMMON, OFF, Vmckpt, flags

# Exit codes of a guard.
ROLLED_BACK = 7
OPEN = 9
PASSED = {
    "check": {"type": "list", "elements": "str", "default": []},
    "address": {"type": "str"},
    "every": {"type": "str"},
    "failures": {"type": "int"},
    "timeout": {"type": "str"},
    "proof": {"type": "str", "choices": ["run", "read"]},
    "keep": {"type": "str"},
    "after_rollback": {"type": "list", "elements": "str", "default": []},
    "max_pause": {"type": "str"},
    "store": {"type": "str"},
}
OPTIONS = {
    "vm": {"type": "str", "required": True},
    "argv": {"type": "list", "elements": "str", "required": True},
    "run_in": {"type": "str", "choices": ["here", "host", "guest"], "default": "here"},
    "watch": {"type": "str"},
    **PASSED,
    **COMMON,
}


def main():
    """Run the module."""
    module = AnsibleModule(argument_spec=OPTIONS, supports_check_mode=True)
    vmckpt, asked = Vmckpt(module), module.params
    if module.check_mode:
        found = vmckpt.show(asked["vm"])
        if found["state"] in OFF:
            module.fail_json(msg=f"{asked['vm']} does not run: it is {found['state']}")
        module.exit_json(changed=True)
    words = flags(asked, PASSED) + flags(
        {"in": asked["run_in"], "for": asked["watch"]}, ("in", "for")
    )
    code, result = vmckpt.run("guard", "run", asked["vm"], "--json", *words, "--", *asked["argv"])
    if code:
        vmckpt.fail(code, result, rolled_back=code == ROLLED_BACK, open=code == OPEN)
    module.exit_json(changed=True, result=result)


if __name__ == "__main__":
    main()
