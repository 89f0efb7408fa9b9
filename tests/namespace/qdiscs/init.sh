#!/bin/sh
# The first process of the router of tests/namespace/qdiscs/cable: a shell that does what comes as lines. Each is answered with "answer STATUS
# BASE64", what it printed as one word. The files are the host's, read only.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
stty -echo -icanon -opost

modules=/usr/lib/uml/modules/$(uname -r)/kernel/net/sched
for module in sch_tbf sch_netem sch_fq_codel sch_cake sch_ingress cls_matchall act_mirred; do
    insmod "$modules/$module.ko"
done
ip link set lo up
for device in vec0 vec1; do
    ip link set "$device" up promisc on
done

echo ready
while read -r line; do
    answer=$(eval "$line" 2>&1)
    status=$?
    echo "answer $status $(printf %s "$answer" | base64 -w0)"
done
echo o >/proc/sysrq-trigger
