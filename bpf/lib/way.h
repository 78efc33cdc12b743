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

/* Return: what is kept of the packet's flow, or NULL. */
inline_fn struct fast_flow *way_slot(struct __sk_buff *skb)
{
	__u32 slot = skb->cb[CB_WAY];

	return slot ? fast_slot(slot - 1) : NULL;
}

/**
 * way_holds - whether a packet of the flow may go the way that its packets have just gone
 * @length: bytes of the longest IP packet that goes out
 */
inline_fn bool way_holds(const struct fast_flow *kept, __u32 length)
{
	return (__s32)(kept->way_until - now_ticks()) >= 0 && length <= kept->at.way.mtu;
}

/**
 * way_keep - keep the way of a packet for those of its flow that follow
 */
inline_fn void way_keep(struct fast_flow *kept, const struct way *way)
{
	if (!way->mtu || !(*(__u32 *)way->macs | *(__u16 *)(way->macs + 4)))
		return;
	kept->way_ifindex = way->ifindex;
	kept->at.way.mtu = way->mtu;
	__builtin_memcpy(kept->at.way.macs, way->macs, sizeof(kept->at.way.macs));
	kept->way_until = now_ticks() + WAY_LIFETIME;
}
