#!/usr/bin/python
"""An Ansible module: have a VM on a host."""

DOCUMENTATION = r"""
module: vmckpt_migrate
short_description: Have a VM on a host, by migrating it if it is elsewhere
description:
  - A VM that runs is migrated live, one that is off is moved with C(--offline). A VM that is on the host stays as it is.
  - Runs on the operator's machine, C(delegate_to) it.
attributes:
  check_mode:
    support: full
    description: C(vmckpt migrate --dry-run) examines both hosts; the module fails if they cannot migrate the VM.
options:
  vm: {description: "The VM's name.", type: str, required: true}
  host: {description: "The destination, by its name in vmckpt's inventory.", type: str, required: true}
  method: {description: "Migration method of a VM that runs.", type: str, choices: [auto, precopy, postcopy, hybrid, stop]}
  max_downtime: {description: "Maximum downtime, e.g. C(300ms).", type: str}
  bandwidth: {description: "Maximum bandwidth per second, e.g. C(500MB).", type: str}
  timeout: {description: "Time limit for memory, e.g. C(5m).", type: str}
  tls: {description: "Encryption of the migration.", type: str, choices: [auto, require, psk, "off"]}
  extra: {description: "Further options of C(vmckpt migrate).", type: list, elements: str, default: []}
  command: {description: "vmckpt on the machine where the module runs.", type: str, default: vmckpt}
  state_dir: {description: "VMCKPT_STATE_DIR there.", type: path}
"""
EXAMPLES = r"""
- name: Have web on h2
  vmckpt_migrate:
    vm: web
    host: h2
    max_downtime: 200ms
  delegate_to: localhost
"""
RETURN = r"""
source: {description: "The host that had the VM.", returned: success, type: str}
host: {description: "The host that has it.", returned: success, type: str}
result: {description: "What vmckpt says about the migration.", returned: changed, type: dict}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.vmckpt import COMMON, OFF, Vmckpt, flags

LIVE = {
    "method": {"type": "str", "choices": ["auto", "precopy", "postcopy", "hybrid", "stop"]},
    "max_downtime": {"type": "str"},
    "bandwidth": {"type": "str"},
    "timeout": {"type": "str"},
    "tls": {"type": "str", "choices": ["auto", "require", "psk", "off"]},
}
OPTIONS = {
    "vm": {"type": "str", "required": True},
    "host": {"type": "str", "required": True},
    **LIVE,
    "extra": {"type": "list", "elements": "str", "default": []},
    **COMMON,
}


def main():
    """Run the module."""
    module = AnsibleModule(argument_spec=OPTIONS, supports_check_mode=True)
    vmckpt, asked = Vmckpt(module), module.params
    found = vmckpt.show(asked["vm"])
    facts = {"source": found["host"], "host": asked["host"]}
    if found["host"] == asked["host"]:
        module.exit_json(changed=False, **facts)
    how = ["--offline"] if found["state"] in OFF else flags(asked, LIVE)
    words = ["migrate", asked["vm"], asked["host"], "--json", *how, *asked["extra"]]
    if module.check_mode:
        words.append("--dry-run")
    module.exit_json(changed=True, result=vmckpt.must(*words), **facts)


if __name__ == "__main__":
    main()
