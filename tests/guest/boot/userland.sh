# In the host's userland, as bash's script: bring up the rails, run the command, report. Talks to the host through the
# control folder: config, command and go come from there; ready, out, err, dmesg and status go there.
ctl=/run/rdma-vm
. $ctl/config
export PATH=/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin

finish() {
  dmesg >$ctl/dmesg
  echo "$1" >$ctl/status
  sync
  busybox poweroff -f
}
set -eE
trap 'echo "guest: line $LINENO failed: $BASH_COMMAND"; finish 125' ERR

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm /dev/hugepages "$SCRATCH"
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
ln -sfn /proc/self/fd /dev/fd
for i in 0.stdin 1.stdout 2.stderr; do ln -sfn fd/${i%.*} /dev/${i#*.}; done
case $ENGINE in
uml)
  mount -t hostfs -o "$SCRATCH" scratch "$SCRATCH"
  mount --bind $ctl/cpuinfo /proc/cpuinfo
  ;;
*) mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=mmap scratch "$SCRATCH" ;;
esac
if [ $HUGEPAGES != 0 ]; then
  echo $HUGEPAGES >/proc/sys/vm/nr_hugepages
  mount -t hugetlbfs huge /dev/hugepages
fi
hostname rdma-vm$RANK
ulimit -l unlimited
ulimit -n 65536
ip link set lo up
sysctl -qw net.ipv4.conf.{all,default}.{rp_filter=0,accept_local=1,arp_ignore=1} net.ipv6.conf.{all,default}.accept_dad=0

# rail, end, number of the end: addresses the interface, makes its peer known and the way there lossy
end() {
  local dev=rail$1$2 mac=02:77:00:00:$(printf %02x $1) other=$((3 - $3)) at=
  if [ -n "$PEER_NETNS" ] && [ $2 = b ]; then
    ip link set $dev netns $PEER_NETNS
    at="ip netns exec $PEER_NETNS"
  fi
  $at ip link set $dev address $mac:0$3 mtu $MTU
  $at ip link set $dev up
  $at ip addr add 10.77.$1.$3/24 dev $dev
  $at ip neigh replace 10.77.$1.$other lladdr $mac:0$other dev $dev nud permanent
  [ -z "$NETEM" ] || $at tc qdisc replace dev $dev root netem limit 100000 $NETEM
  $at rdma link add rxe$1$2 type rxe netdev $dev
}
if [ -n "$PEER_NETNS" ]; then
  ip netns add $PEER_NETNS
  ip netns exec $PEER_NETNS sysctl -qw net.ipv6.conf.{all,default}.accept_dad=0
  ip -n $PEER_NETNS link set lo up
fi
for ((i = 0; i < RAILS; i++)); do
  if [ $GUESTS = 1 ]; then
    ip link add rail${i}a type veth peer name rail${i}b
    end $i a 1
    end $i b 2
  else
    ip link set $NIC$i name rail$i$END
    end $i $END $((RANK + 1))
  fi
done
for ((t = 0; t < 100; t++)); do
  ! rdma link | grep -qv 'state ACTIVE' && break
  sleep 0.1
done
trap - ERR
set +e
echo "guest: ready after $(cut -d' ' -f1 /proc/uptime) s"
if [ $GUESTS = 2 ]; then # both begin together
  touch $ctl/ready
  for ((t = 0; t < 1200; t++)); do
    [ -e $ctl/go ] && break
    sleep 0.1
  done
fi

# Through pipes, so that a program that opens /dev/stdout anew cuts off nothing.
exec 3> >(exec cat >>$ctl/out) 4> >(exec cat >>$ctl/err)
began=$SECONDS
timeout -k 5 $TIMEOUT bash $ctl/command </dev/null >&3 2>&4 3>&- 4>&-
status=$?
exec 3>&- 4>&-
[ $status = 137 ] && [ $((SECONDS - began)) -ge $TIMEOUT ] && status=124
for ((t = 0; t < 100; t++)); do
  pgrep -P $$ -x cat >/dev/null || break
  sleep 0.02
done
finish $status
