/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The way out that packets of a flow have just gone: device, MTU and the
 * neighbour's link address as the kernel's routing and neighbour tables gave
 * them, kept for a moment in the flow's slot of the short way. When the moment
 * is over one packet asks the tables again, and goes by the kernel's neighbour
 * code, which finds out whether the neighbour still answers.
 */
#pragma once

#include "common.h"
#include "parse.h"

#define WAY_LIFETIME 16 /* ticks: 16 to 160 ms */

/* Where a packet goes out. */
struct way {
	__u32 ifindex;
	__u32 mtu; /* bytes, without the link header; 0: not known */
	struct bpf_redir_neigh next;
	__u8 macs[2 * ETH_ALEN]; /* both link addresses; zero when the neighbour is not known */
};

#define WAY_NONE 0xffffffff /* no slot: nothing is kept of the packet's flow yet */

/* In front lie slots 0 to FAST_FRONT - 1. */
inline_fn struct fast_flow *fast_slot(__u32 slot)
{
	struct fast_front *front;
	__u32 key = 0;

	if (slot >= FAST_FRONT) {
		key = slot - FAST_FRONT;
		return bpf_map_lookup_elem(&mst_fast_v1, &key);
	}
	front = bpf_map_lookup_elem(&mst_fast_front_v1, &key);
	if (!front)
		return NULL;
	opaque(slot); /* else the compiler adds before it compares, which kernels before 6.14 refuse */
	return &front->slots[slot & (FAST_FRONT - 1)];
}

/* From here on cb[CB_WAY] says where the packet's flow is kept. */
inline_fn void way_slot_note(struct __sk_buff *skb, __u32 slot)
{
	skb->cb[CB_WAY] = slot + 1;
}

/* What cb[CB_WAY] says of a flow without translation that lies near: its entry has room for its way. */
#define WAY_NEAR (1u << 24)
inline_fn __u32 way_near_code(__u32 place, bool second)
{
	return WAY_NEAR | place << 1 | second;
}

inline_fn struct way_kept *way_near(struct near_flow *n)
{
	return &((struct near_ways *)&n->e.other)->out;
}

/* Return: the flow whose way has this code, or NULL. */
inline_fn struct near_flow *way_near_flow(__u32 code)
{
	__u32 key = (code & ~WAY_NEAR) >> 1;
	struct near_place *place = code & WAY_NEAR ? bpf_map_lookup_elem(&mst_ct_near_v1, &key) : NULL;

	if (!place)
		return NULL;
	opaque(place); /* else the compiler adds before it asks */
	return &place->flows[code & 1];
}

/* Return: where the way of the packet's flow is kept, or NULL. */
inline_fn struct way_kept *way_slot(struct __sk_buff *skb)
{
	__u32 slot = skb->cb[CB_WAY];
	struct near_flow *n;
	struct fast_flow *fast;

	if (!slot)
		return NULL;
	if (slot & WAY_NEAR) {
		n = way_near_flow(slot);
		return n ? way_near(n) : NULL;
	}
	fast = fast_slot(slot - 1);
	if (!fast)
		return NULL;
	opaque(fast);
	return &fast->at.way;
}

/**
 * way_holds - whether a packet of the flow may go the way that its packets have just gone
 * @length: bytes of the longest IP packet that goes out
 */
inline_fn bool way_holds(const struct way_kept *kept, __u32 length)
{
	/* No generation tells an old one: of a sign alone it would hold again once half of all ticks have gone by. */
	return kept->until - (__u32)now_ticks() <= WAY_LIFETIME && length <= kept->mtu;
}

/**
 * way_keep - keep the way of a packet for those of its flow that follow
 */
inline_fn void way_keep(struct way_kept *kept, const struct way *way)
{
	if (!way->mtu || !(*(__u32 *)way->macs | *(__u16 *)(way->macs + 4)))
		return;
	kept->ifindex = way->ifindex;
	kept->mtu = way->mtu;
	__builtin_memcpy(kept->macs, way->macs, sizeof(kept->macs));
	kept->until = now_ticks() + WAY_LIFETIME;
}
