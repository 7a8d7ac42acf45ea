"""Examples in `--help`: at least two for each command; a test parses each."""

import click

_EXAMPLES = """
migrate
    vmckpt migrate web h2
    vmckpt migrate web h2 --max-downtime 200ms --finish-within 10m
    vmckpt migrate web h2 --method hybrid --bandwidth 500MB/s --dry-run
check
    vmckpt check web h2
    vmckpt check web h2 h3 --method hybrid --json
plan
    vmckpt plan web h2
    vmckpt plan web h2 --max-downtime 200ms --finish-by 02:00
dirty-rate
    vmckpt dirty-rate web --for 10s
    vmckpt dirty-rate web --watch
fork
    vmckpt fork nightly-2026-11-26 --count 8 --name test
    vmckpt fork web --host h2
top
    vmckpt top
    vmckpt top --once --json
drain
    vmckpt drain h1 --dry-run
    vmckpt drain h1 --to h2 --finish-within 30m
undrain
    vmckpt undrain h1 --dry-run
    vmckpt undrain h1
serve
    vmckpt serve --scheduler
    vmckpt serve --scheduler --json
notify
    vmckpt notify
    vmckpt notify --undelivered
config
    vmckpt config
    vmckpt config --json
vm run
    vmckpt vm run web.toml
    vmckpt vm run web.toml --host h2
vm adopt
    vmckpt vm adopt web --qmp /run/web.qmp
    vmckpt vm adopt web --qmp /run/web.qmp --host h2
vm list
    vmckpt vm list
    vmckpt vm list --host h1
    vmckpt vm list --json
vm show
    vmckpt vm show web
    vmckpt vm show web --json
vm console
    vmckpt vm console web
    vmckpt vm console db
vm start
    vmckpt vm start web
    vmckpt vm start --autostart
vm define
    vmckpt vm define web.toml
    vmckpt vm define web.toml --host h1
vm edit
    vmckpt vm edit web
    vmckpt vm edit web --spec web.toml
vm import
    vmckpt vm import web
    vmckpt vm import web --name web2
    vmckpt vm import web.xml --host h1
vm export
    vmckpt vm export web
    vmckpt vm export web --format libvirt
vm pause
    vmckpt vm pause web
    vmckpt vm pause web --json
vm resume
    vmckpt vm resume web
    vmckpt vm resume web --json
vm reboot
    vmckpt vm reboot web --timeout 2m
    vmckpt vm reboot web --force
vm network
    vmckpt vm network web-copy isolated
    vmckpt vm network web-copy plugged
vm autostart
    vmckpt vm autostart web on
    vmckpt vm autostart web off
vm stop
    vmckpt vm stop web
    vmckpt vm stop web --timeout 30s --force
vm rm
    vmckpt vm rm web-copy
    vmckpt vm rm web-copy --disks
replicate start
    vmckpt replicate start web h2 --lease etcd:http://10.0.0.9:2379
    vmckpt replicate start web h2 --lease /srv/leases --epoch 25ms --max-pause 10ms
replicate keep
    vmckpt replicate keep web h2 h3 --lease etcd:http://10.0.0.9:2379
    vmckpt replicate keep web h2 h3 --lease h4: --window 02:00-05:00
replicate failover
    vmckpt replicate failover web
    vmckpt replicate failover web --primary-is-dead
replicate failback
    vmckpt replicate failback web
    vmckpt replicate failback web h1
replicate stop
    vmckpt replicate stop web
    vmckpt replicate stop web --standby-is-dead
replicate status
    vmckpt replicate status web
    vmckpt replicate status web --watch
replicate events
    vmckpt replicate events web
    vmckpt replicate events web --follow
checkpoint create
    vmckpt checkpoint create web --name before-upgrade
    vmckpt checkpoint create web --store s3://backups/vms --key-file key
    vmckpt checkpoint create --group web,db --name evening
checkpoint list
    vmckpt checkpoint list
    vmckpt checkpoint list web --store h2:
checkpoint show
    vmckpt checkpoint show before-upgrade
    vmckpt checkpoint show --group evening
checkpoint diff
    vmckpt checkpoint diff before-upgrade after-upgrade
    vmckpt checkpoint diff 1f0c 88ab --json
checkpoint verify
    vmckpt checkpoint verify before-upgrade
    vmckpt checkpoint verify before-upgrade --store h2:
checkpoint pin
    vmckpt checkpoint pin before-upgrade
    vmckpt checkpoint pin before-upgrade --reason "audit 2026"
checkpoint unpin
    vmckpt checkpoint unpin before-upgrade
    vmckpt checkpoint unpin before-upgrade --force
checkpoint rm
    vmckpt checkpoint rm before-upgrade
    vmckpt checkpoint rm before --kind internal --vm web
checkpoint prune
    vmckpt checkpoint prune web --keep-last 5 --keep-daily 7
    vmckpt checkpoint prune web --keep-last 5 --keep-daily 7 --apply
checkpoint restore
    vmckpt checkpoint restore before-upgrade --as web-copy
    vmckpt checkpoint restore before-upgrade --in-place
    vmckpt checkpoint restore before-upgrade --as web-copy --host h2
    vmckpt checkpoint restore before-upgrade --kind internal --vm shop
checkpoint export-disk
    vmckpt checkpoint export-disk before-upgrade disk-0 web.qcow2
    vmckpt checkpoint export-disk before-upgrade disk-0 web.img --format raw
checkpoint export
    vmckpt checkpoint export before-upgrade /var/lib/libvirt/images/web
    vmckpt checkpoint export before-upgrade web-exported --format libvirt-save
checkpoint serve-disk
    vmckpt checkpoint serve-disk before-upgrade /run/web.nbd
    vmckpt checkpoint serve-disk before-upgrade /run/web.nbd --store h2:
checkpoint mount
    vmckpt checkpoint mount before-upgrade /mnt
    vmckpt checkpoint mount before-upgrade /mnt --store h2:
guard run
    vmckpt guard run web --check 'curl -f http://10.0.0.5/' -- apt-get -y upgrade
    vmckpt guard run web --in guest --on-failure ask -- systemctl restart nginx
guard list
    vmckpt guard list
    vmckpt guard list --json
guard commit
    vmckpt guard commit web
    vmckpt guard commit web --json
guard rollback
    vmckpt guard rollback web
    vmckpt guard rollback web --json
guard resume
    vmckpt guard resume web
    vmckpt guard resume web --json
schedule add
    vmckpt schedule add web --every 15m --keep-last 8 --keep-daily 7
    vmckpt schedule add db --cron '30 3 * * *' --keep-daily 14 --copy-to h2:
schedule list
    vmckpt schedule list
    vmckpt schedule list --json
schedule show
    vmckpt schedule show web
    vmckpt schedule show web --json
schedule rm
    vmckpt schedule rm web
    vmckpt schedule rm web --json
schedule next
    vmckpt schedule next
    vmckpt schedule next web --count 10
schedule run-due
    vmckpt schedule run-due
    vmckpt schedule run-due web
device list
    vmckpt device list gpu-1
    vmckpt device list gpu-1 --json
device cards
    vmckpt device cards h2
    vmckpt device cards h2 --match 10de:2330
device recover
    vmckpt device recover gpu-1
    vmckpt device recover gpu-1 --json
device hook
    vmckpt device hook nvidia
    vmckpt device hook generic
host list
    vmckpt host list
    vmckpt host list --json
host add
    vmckpt host add h1 ssh://root@h1.example.org
    vmckpt host add h2 ssh://root@h2.example.org --migration-addr 10.0.0.2
host set
    vmckpt host set h1 --migration-addr 10.0.0.1
    vmckpt host set h1 --libvirt /run/libvirt/libvirt-sock
host rm
    vmckpt host rm h1
    vmckpt host rm h1 --json
host calibrate
    vmckpt host calibrate h1 h2
    vmckpt host calibrate h1 h2 --size 1GiB
host images
    vmckpt host images h1
    vmckpt host images h1 --remove-unused
host check
    vmckpt host check h1
    vmckpt host check --fixes
store init
    vmckpt store init h2:
    vmckpt store init s3://backups/vms --key-file key
store info
    vmckpt store info
    vmckpt store info h2:
store accept
    vmckpt store accept
    vmckpt store accept /mnt/backups
store check
    vmckpt store check
    vmckpt store check s3://backups/vms --read-data-subset 5%
store repair
    vmckpt store repair h2:
    vmckpt store repair h2: --apply
store gc
    vmckpt store gc --dry-run
    vmckpt store gc h2:
store export
    vmckpt store export web.vmckpt before-upgrade
    vmckpt store export all.vmckpt --store h2:
store import
    vmckpt store import web.vmckpt
    vmckpt store import web.vmckpt before-upgrade --store h2:
store copy
    vmckpt store copy h2: before-upgrade
    vmckpt store copy s3://backups/vms --store h2:
store key list
    vmckpt store key list
    vmckpt store key list --store s3://backups/vms
store key add
    vmckpt store key add --key-file key --new-key-file second --name laptop
    vmckpt store key add --key-file key --new-key-command 'pass vmckpt' --name escrow
store key rotate
    vmckpt store key rotate --key-file key --new-key-file new
    vmckpt store key rotate --store h2: --key-file key --new-key-file new
store key rm
    vmckpt store key rm 3f9a --key-file key
    vmckpt store key rm 3f9a --store h2: --key-file key
store key export
    vmckpt store key export store.backup
    vmckpt store key export store.txt --paper
store key import
    vmckpt store key import store.backup
    vmckpt store key import store.backup --store h2: --replace
pki init
    vmckpt pki init
    vmckpt pki init --days 3650
pki issue
    vmckpt pki issue h1 h2
    vmckpt pki issue h1 --days 90
pki show
    vmckpt pki show
    vmckpt pki show h1
runs list
    vmckpt runs list
    vmckpt runs list --json
runs show
    vmckpt runs show 20261127T101500-web
    vmckpt runs show 20261127T101500-web --json
runs attach
    vmckpt runs attach 20261127T101500-web
    vmckpt runs attach 20261127T101500-web --json
runs score
    vmckpt runs score
    vmckpt runs score --json
runs report
    vmckpt runs report 20261127T101500-web
    vmckpt runs report 20261127T101500-web --html run.html
runs replay
    vmckpt runs replay 20261127T101500-web --policy policy.toml
    vmckpt runs replay 20261127T101500-web --policy policy.toml --json
metrics serve
    vmckpt metrics serve
    vmckpt metrics serve --listen 127.0.0.1:9112
lab up
    vmckpt lab up
    vmckpt lab up --hosts 3
lab status
    vmckpt lab status
    vmckpt lab status --json
lab down
    vmckpt lab down
    vmckpt lab down --yes
lab demo
    vmckpt lab demo --image debian
    vmckpt lab demo --image debian --qemu /usr/bin/qemu-system-x86_64
"""


def examples() -> dict[str, list[str]]:
    """The command lines of each command, by its words."""
    found, words = dict[str, list[str]](), ""
    for line in _EXAMPLES.strip().splitlines():
        if line.startswith(" "):
            found[words].append(line.strip())
        else:
            words = line
            found[words] = []
    return found


def add_examples(root: click.Command) -> None:
    """Give each command below `root` its examples, for its help."""
    for words, lines in examples().items():
        command: click.Command | None = root
        for word in words.split():
            command = command.commands.get(word) if isinstance(command, click.Group) else None
        if command is not None:
            command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
