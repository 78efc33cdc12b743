/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Dropping, counting, and telling whoever watches. */
#pragma once

#include "common.h"
#include "count.h"
#include "events.h"

/**
 * drop - count a packet under its reason, tell readers of it, and end it
 * @skb: the packet
 * @reason: enum drop_reason
 * @dir: enum direction
 *
 * Return: TC_ACT_SHOT.
 */
slow_fn int drop(struct __sk_buff *skb, __u32 reason, __u32 dir)
{
	count_drop(skb, reason, dir);
	event_stopped(skb, reason, dir, EVENT_DROPPED, now_seconds());
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
