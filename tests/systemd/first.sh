#!/bin/sh
# Begins a machine in namespaces of its own: lays out its root, then becomes its systemd.
# first.sh DIRECTORY ROOT: DIRECTORY has `upper`, `work` and `new`; ROOT is not written to.
# A line on standard input says that it is connected.
set -e
mount -t overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" overlay "$1/new"
cp "$1/boot_id" "$1/new/boot_id"
cd "$1/new"
mkdir -p .old
pivot_root . .old
mount -t proc proc /proc
mount --bind /boot_id /proc/sys/kernel/random/boot_id
# Settings of the whole kernel stay as they are; udev, which would need a machine, does not start.
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -t sysfs -o ro sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=0755 tmpfs /run
mount -t tmpfs -o mode=0755 tmpfs /dev
mkdir /dev/pts /dev/shm /dev/net
for name in null zero full random urandom tty kvm net/tun userfaultfd; do
    if [ -e "/.old/dev/$name" ]; then cp -a "/.old/dev/$name" "/dev/$name"; fi
done
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ln -s pts/ptmx /dev/ptmx
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
hostname "$(cat /etc/hostname)"
umount --lazy /.old
read -r _
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=console
