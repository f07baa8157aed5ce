#!/bin/bash
# The first process under user-mode Linux, on the host's root: that root under a layer of memory.
# CTL is the control folder.
mount -t tmpfs tmpfs /run && mkdir /run/u /run/w /run/new &&
mount -t overlay -o lowerdir=/,upperdir=/run/u,workdir=/run/w overlay /run/new &&
mkdir -p /run/new/run/rdma-vm && mount -t hostfs -o CTL ctl /run/new/run/rdma-vm &&
exec /bin/busybox chroot /run/new /bin/bash /run/rdma-vm/init
echo "guest: cannot mount the root"; exec /bin/busybox poweroff -f
