#!/bin/busybox sh
# The first process under QEMU, from the initramfs: drivers, then the host's root under a layer of memory.
/bin/busybox --install /bin
mount -t proc proc /proc
while read m; do insmod /modules/$m || echo "guest: no module $m"; done </modules/order
p9=trans=virtio,version=9p2000.L,msize=524288
mount -t 9p -o $p9,ro,cache=loose root /lower && mount -t tmpfs tmpfs /rw && mkdir /rw/u /rw/w &&
mount -t overlay -o lowerdir=/lower,upperdir=/rw/u,workdir=/rw/w overlay /new &&
mkdir -p /new/run/rdma-vm && mount -t 9p -o $p9,cache=none ctl /new/run/rdma-vm &&
umount /proc && exec switch_root /new /bin/bash /run/rdma-vm/init
echo "guest: cannot mount the root"; reboot -f
