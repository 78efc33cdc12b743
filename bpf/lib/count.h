/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Counting: all that the entry programs can do, which are loaded for every attachment. */
#pragma once

#include "common.h"

inline_fn void count_drop(struct __sk_buff *skb, __u32 reason, __u32 dir)
{
	__u32 slot = reason * DIR_COUNT + dir;
	struct counter *c = bpf_map_lookup_elem(&mst_drops_v1, &slot);

	if (c) {
		c->packets++;
		c->bytes += skb->len;
	}
	skb->cb[CB_REASON] = reason;
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
