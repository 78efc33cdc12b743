/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Dropping and counting. */
#pragma once

#include "common.h"

/**
 * drop - count a packet under its reason and end it
 * @skb: the packet
 * @reason: enum drop_reason
 * @dir: enum direction
 *
 * Return: TC_ACT_SHOT.
 */
slow_fn int drop(struct __sk_buff *skb, __u32 reason, __u32 dir)
{
	__u32 slot = reason * DIR_COUNT + dir;
	struct counter *c = bpf_map_lookup_elem(&mst_drops_v1, &slot);

	if (c) {
		c->packets++;
		c->bytes += skb->len;
	}
	skb->cb[CB_REASON] = reason;
	return TC_ACT_SHOT;
}

inline_fn void count_from_pod(__u32 id, __u32 bytes)
{
	struct endpoint_counters *c = bpf_map_lookup_elem(&mst_endpoint_counters_v1, &id);

	if (!c)
		return;
	c->from_pod.packets++;
	c->from_pod.bytes += bytes;
}

inline_fn void count_to_pod(__u32 id, __u32 bytes)
{
	struct endpoint_counters *c = bpf_map_lookup_elem(&mst_endpoint_counters_v1, &id);

	if (!c)
		return;
	c->to_pod.packets++;
	c->to_pod.bytes += bytes;
}
