/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* This node among others: its own settings, and which node an address belongs to. */
#pragma once

#include "common.h"

#define ADDR_BITS 128

inline_fn struct node_config *node_config(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mst_node_v1, &zero);
}

/* Whether a port is that of the tunnel between nodes: what comes there from a node is a packet of any pod of its. */
inline_fn bool of_tunnel(__u8 proto, __be16 port)
{
	struct node_config *n = proto == IPPROTO_UDP ? node_config() : NULL;

	return n && n->overlay && n->port == port;
}

/* Return: the node with this reference; NULL when it is gone or has changed since. */
inline_fn struct remote *remote_of(__u32 ref)
{
	__u32 slot = ref & 0xffff;
	struct remote *r = bpf_map_lookup_elem(&mst_remotes_v1, &slot);

	return r && ref && r->ref == ref ? r : NULL;
}

/* Return: the reference of the node that has this address between nodes, however it is reached, or 0. */
inline_fn __u32 node_with(const struct addr *a)
{
	__u32 *ref = bpf_map_lookup_elem(&mst_tunnel_peers_v1, a);

	return ref ? *ref : 0;
}

/* The same of a node that is reached by the tunnel. */
inline_fn __u32 tunnel_peer(const struct addr *a)
{
	__u32 ref = node_with(a);
	struct remote *r = remote_of(ref);

	return r && r->flags & REMOTE_TUNNEL ? ref : 0;
}

/**
 * remote_find - whose pods' networks an address lies in
 * Return: the node's reference, or 0.
 */
inline_fn __u32 remote_find(const struct addr *a)
{
	struct prefix key = { .length = ADDR_BITS };
	__u32 *ref;

	__builtin_memcpy(key.addr, a, sizeof(key.addr));
	ref = bpf_map_lookup_elem(&mst_remote_nets_v1, &key);
	return ref ? *ref : 0;
}

/* Whether an address is of a node that is reached by the tunnel, or of its pods. */
inline_fn bool by_tunnel(const struct addr *a)
{
	struct remote *r = remote_of(remote_find(a));

	return r && r->flags & REMOTE_TUNNEL;
}

/**
 * beside_tunnel - whether a packet at a pod's host end wears the address of a pod behind the tunnel, and came in beside it
 * @skb: it came in by a device
 *
 * At the NIC it was left to the host's stack, or none of our programs is where it came in. A node's own address is
 * the wire's, too, and as good there as any.
 */
slow_fn bool beside_tunnel(const struct __sk_buff *skb, const struct addr *src)
{
	struct node_config *n = node_config();
	__u32 in = skb->ingress_ifindex;

	if (!n || !n->overlay || !src || in == n->overlay || in == n->gather)
		return false;
	return by_tunnel(src) && !node_with(src);
}
