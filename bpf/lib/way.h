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

#define WAY_SHIFT 26 /* moments of 2^26 ns, 67 ms: a way holds until the next one ends */

/* Where a packet goes out. */
struct way {
	__u32 ifindex;
	__u32 mtu; /* bytes, without the link header; 0: not known */
	struct bpf_redir_neigh next;
	__u8 macs[2 * ETH_ALEN]; /* both link addresses; zero when the neighbour is not known */
};

inline_fn __u32 now_moments(void)
{
	return bpf_ktime_get_coarse_ns() >> WAY_SHIFT;
}

#define WAY_NONE 0xffffffff /* no slot: of what is not plain, no way is kept */

/* From here on cb[CB_WAY] says where the way of the packet's flow is kept. */
inline_fn void way_slot_note(struct __sk_buff *skb, __u32 slot)
{
	skb->cb[CB_WAY] = slot + 1;
}

inline_fn struct fast_flow *way_slot(struct __sk_buff *skb)
{
	__u32 slot = skb->cb[CB_WAY] - 1;

	return bpf_map_lookup_elem(&mst_fast_v1, &slot);
}

/* The tuple with which packets of the slot's flow leave. */
inline_fn const struct tuple *way_tuple(const struct fast_flow *kept)
{
	return kept->flags & FAST_TRANSLATE ? &kept->to : &kept->t;
}

/**
 * way_holds - whether the packet may go the way that its flow's packets have just gone
 * @p: as it leaves
 * @length: bytes of the longest IP packet that goes out
 */
inline_fn bool way_holds(const struct fast_flow *kept, const struct pkt *p, __u32 length)
{
	return tuple_equal(way_tuple(kept), &p->t) && kept->proto == p->proto &&
	       (__s32)(kept->way_until - now_moments()) >= 0 && length <= kept->way_mtu;
}

/**
 * way_keep - keep the way of a packet for those that follow
 * @p: as it leaves
 *
 * In a slot that another flow had, nothing is decided yet.
 */
inline_fn void way_keep(struct fast_flow *kept, const struct pkt *p, const struct way *way)
{
	if (!way->mtu || !(*(__u32 *)way->macs | *(__u16 *)(way->macs + 4)))
		return;
	if (!tuple_equal(way_tuple(kept), &p->t) || kept->proto != p->proto) {
		kept->t = p->t;
		kept->t.pad = 0; /* no hook's */
		kept->proto = p->proto;
		kept->flags = 0;
	}
	kept->way_ifindex = way->ifindex;
	kept->way_mtu = way->mtu;
	__builtin_memcpy(kept->way_macs, way->macs, sizeof(kept->way_macs));
	kept->way_until = now_moments() + 1;
}
