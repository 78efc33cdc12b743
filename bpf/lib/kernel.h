/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What is used of the kernel's own structures: found by name when a program is loaded (CO-RE). */
#pragma once

#include <linux/in6.h>
#include <bpf/bpf_core_read.h>

#include "common.h"

#define AF_INET 2
#define AF_INET6 10
#define AF_PACKET 17
#define AF_XDP 44
#define LOOPBACK_IFINDEX 1

struct net {
	__u64 net_cookie;
} __attribute__((preserve_access_index));

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	int skc_bound_dev_if;
	struct {
		struct net *net;
	} skc_net;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
	unsigned int sk_kern_sock : 1;
} __attribute__((preserve_access_index));

struct sk_buff {
	struct sock *sk;
} __attribute__((preserve_access_index));

/**
 * sender_netns - cookie of the namespace whose socket sent the packet
 *
 * Return: 0 when no socket did: it was forwarded, or the kernel made it.
 */
inline_fn __u64 sender_netns(struct __sk_buff *skb)
{
	struct sk_buff *kernel = (void *)skb;

	return skb->sk ? BPF_CORE_READ(kernel, sk, __sk_common.skc_net.net, net_cookie) : 0;
}

/* The socket that sent a packet, as far as it shows. */
struct sent_by {
	bool passes_hooks; /* it may send past the egress hooks of its device */
	__u16 port;        /* its own */
};

inline_fn void sender_socket(struct __sk_buff *skb, struct sent_by *by)
{
	struct sk_buff *kernel = (void *)skb;
	__u16 family = BPF_CORE_READ(kernel, sk, __sk_common.skc_family);

	by->passes_hooks = family == AF_PACKET || family == AF_XDP;
	by->port = BPF_CORE_READ(kernel, sk, __sk_common.skc_num);
}
