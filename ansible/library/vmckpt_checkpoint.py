#!/usr/bin/python
"""An Ansible module: have a checkpoint of a VM, or have none of that name."""

DOCUMENTATION = r"""
module: vmckpt_checkpoint
short_description: Take or remove a checkpoint of a VM
description:
  - A checkpoint of that name which is there is left alone, unless O(replace=true). Without a name one is taken each time.
  - If a store does not answer, the module fails rather than take a checkpoint that may be there. O(store) asks that one only.
  - Runs on the operator's machine, C(delegate_to) it.
attributes:
  check_mode: {support: full, description: "Reports whether a checkpoint would be taken or removed."}
options:
  vm: {description: "The VM's name.", type: str, required: true}
  name: {description: "The checkpoint's name; required for O(state=absent).", type: str}
  state: {description: "Whether the checkpoint is to be there.", type: str, choices: [present, absent], default: present}
  replace: {description: "Take it anew if it is there.", type: bool, default: false}
  tags: {description: "Tags of a new checkpoint.", type: dict, default: {}}
  kind: {description: "C(epoch) of a running VM to a store; C(file) as a whole.", type: str, choices: [epoch, file]}
  max_pause: {description: "Maximum time for copying memory during a pause, e.g. C(10ms).", type: str}
  store: {description: "Store: a directory, C(HOST:), C(s3://...). Default, all known ones; for a new one the host's.", type: str}
  key_file: {description: "File with the key of an encrypted store.", type: path}
  command: {description: "vmckpt on the machine where the module runs.", type: str, default: vmckpt}
  state_dir: {description: "VMCKPT_STATE_DIR there.", type: path}
"""
EXAMPLES = r"""
- name: Have a checkpoint from before the upgrade
  vmckpt_checkpoint:
    vm: web
    name: before-upgrade
    tags: {release: "2.4"}
  delegate_to: localhost

- name: Have it no more
  vmckpt_checkpoint: {vm: web, name: before-upgrade, state: absent}
  delegate_to: localhost
"""
RETURN = r"""
checkpoints: {description: "The checkpoints of that name that were found before.", returned: success, type: list}
result: {description: "What vmckpt says about the new or removed one.", returned: changed without check mode, type: dict}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils.vmckpt import COMMON, Vmckpt, flags

OPTIONS = {
    "vm": {"type": "str", "required": True},
    "name": {"type": "str"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "replace": {"type": "bool", "default": False},
    "tags": {"type": "dict", "default": {}},
    "kind": {"type": "str", "choices": ["epoch", "file"]},
    "max_pause": {"type": "str"},
    "store": {"type": "str"},
    "key_file": {"type": "path", "no_log": False},
    **COMMON,
}


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec=OPTIONS,
        supports_check_mode=True,
        required_if=[("state", "absent", ["name"])],
    )
    vmckpt, asked = Vmckpt(module), module.params
    where, found = flags(asked, ("store", "key_file")), []
    if asked["name"]:
        listed = vmckpt.must("checkpoint", "list", asked["vm"], "--json", *where)
        found = [one for one in listed["checkpoints"] if _name(one) == asked["name"]]
        if listed["silent"] and not found:
            why = "; ".join(f"{one['what']}: {one['why']}" for one in listed["silent"])
            module.fail_json(msg=f"whether it is there is not known: {why}; or set store")
    facts = {"checkpoints": found}
    if asked["state"] == "absent":
        if found and not module.check_mode:
            ids = [one["id"] for one in found]
            facts["result"] = vmckpt.must("checkpoint", "rm", *ids, "--json", *where)
        module.exit_json(changed=bool(found), **facts)
    if found and not asked["replace"]:
        module.exit_json(changed=False, **facts)
    vmckpt.show(asked["vm"])
    if not module.check_mode:
        words = flags(asked, ("name", "kind", "max_pause"))
        words += flags(
            {"tag": [f"{key}={value}" for key, value in asked["tags"].items()]}, ("tag",)
        )
        words += ["--replace"] if asked["replace"] else []
        create = ("checkpoint", "create", asked["vm"], "--json")
        facts["result"] = vmckpt.must(*create, *words, *where)
    module.exit_json(changed=True, **facts)


def _name(checkpoint):
    return (checkpoint["facts"] or {}).get("name")


if __name__ == "__main__":
    main()
