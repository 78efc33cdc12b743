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
