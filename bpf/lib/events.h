/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Telling whoever watches: a flow was opened or closed, a packet or a connect()
 * did not pass. Never on the path of an established flow's packets, and for the
 * price of one comparison while nobody watches; but the last packets that did
 * not pass are kept for who asks afterwards, so many a second.
 *
 * A program that wants to say more than these functions do takes an event from
 * event_of(), fills in what it knows, and gives it to event_send().
 */
#pragma once

#include "common.h"
#include "parse.h"

/* Return: whether anybody reads events. */
inline_fn bool observed(__u32 now)
{
	__u32 all = 0;
	struct reader *r = bpf_map_lookup_elem(&mst_readers_v1, &all);

	return r && (__s32)(r->until - now) > 0;
}

_Static_assert(sizeof(struct pkt) <= sizeof(((struct event_room *)0)->pkt), "room for a pkt");

inline_fn struct event_room *event_room(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mst_event_room_v1, &zero);
}

/* Whether one more event is within a limit for this second. */
inline_fn bool within(struct event_rate *r, __u32 now, __u32 limit)
{
	if (r->second != now) {
		r->second = now;
		r->count = 0;
	}
	return r->count++ < limit;
}

/* Not part of every packet's price, so that both ends of a flow, and its end, are told or none. */
inline_fn bool sampled(const struct event *e, const struct reader *r)
{
	const struct tuple *t = &e->t;
	__u64 h;

	if (r->sample < 2 || e->kind == EVENT_STOPPED)
		return true;
	h = t->src.quads[1] ^ t->dst.quads[1] ^ t->src.quads[0] ^ t->dst.quads[0];
	h = (h ^ (t->sport ^ t->dport)) * 0x9e3779b97f4a7c15;
	return (__u32)(h >> 32) % r->sample == 0;
}

/* Whether there is a reader at a place, and it wants the event. */
inline_fn bool event_wanted(const struct event *e, __u32 slot, __u32 now)
{
	__u32 place = slot + 1;
	struct reader *r = bpf_map_lookup_elem(&mst_readers_v1, &place);

	return r && (__s32)(r->until - now) > 0 && sampled(e, r);
}

inline_fn void event_put(struct event *e, struct event_counts *counts, __u32 slot)
{
	void *ring = bpf_map_lookup_elem(&mst_events_v1, &slot);

	if (!ring)
		return;
	if (bpf_ringbuf_output(ring, e, sizeof(*e), 0))
		counts->lost[slot & (EVENT_READERS - 1)]++;
	else
		counts->told++;
}

/**
 * event_send - give an event to every reader that wants it, within the limits
 */
global_fn int event_send(struct event *e, __u32 now)
{
	struct event_room *room = event_room();
	struct event_rate *rate;
	bool counted = false;
	__u32 id;

	if (!e || !room)
		return 0;
	id = e->endpoint;
	for (__u32 slot = 0; slot < EVENT_READERS; slot++) {
		if (!event_wanted(e, slot, now))
			continue;
		if (!counted) { /* what nobody wants takes nothing from the rest */
			rate = bpf_map_lookup_elem(&mst_event_rates_v1, &id);
			if (!dry_run && ((rate && !within(rate, now, EVENTS_PER_ENDPOINT)) ||
					 !within(&room->counts.rate, now, EVENTS_PER_CPU))) {
				room->counts.limited++;
				return 0;
			}
			counted = true;
			e->time = bpf_ktime_get_ns();
		}
		event_put(e, &room->counts, slot);
	}
	return 0;
}

enum stopped_for {
	STOPPED_FOR_NOBODY = 0,
	STOPPED_FOR_READERS = 1,
	STOPPED_FOR_LATER = 2,
};

/* Return: enum stopped_for, both or none: whom to tell that a packet does not pass. */
inline_fn __u32 stopped_for(struct event_room *room, __u32 now)
{
	return (observed(now) ? STOPPED_FOR_READERS : 0) |
	       (within(&room->stopped, now, STOPPED_PER_SECOND) ? STOPPED_FOR_LATER : 0);
}

/**
 * event_stopped_send - give the event of a packet that does not pass to readers, and keep it
 * @whom: enum stopped_for
 */
global_fn int event_stopped_send(struct event *e, __u32 whom, __u32 now)
{
	struct event_room *room = event_room();
	struct event *kept;
	__u32 slot;

	if (!e || !room)
		return 0;
	if (whom & STOPPED_FOR_LATER) {
		/* A program that interrupts this one gets the slot after. */
		slot = __sync_fetch_and_add(&room->next, 1) % STOPPED_KEPT;
		kept = bpf_map_lookup_elem(&mst_stopped_v1, &slot);
		e->time = bpf_ktime_get_ns();
		if (kept)
			*kept = *e;
	}
	return whom & STOPPED_FOR_READERS ? event_send(e, now) : 0;
}

/**
 * event_of - an event about a packet, as far as its headers tell
 * @p: the packet as it was parsed
 * @dir: enum direction
 *
 * Return: this CPU's event, or NULL.
 */
inline_fn struct event *event_of(struct __sk_buff *skb, const struct pkt *p, __u32 dir)
{
	struct event_room *room = event_room();
	struct event *e;

	if (!room)
		return NULL;
	e = &room->event;
	__builtin_memset(e, 0, sizeof(*e));
	e->t = p->t;
	e->proto = p->proto;
	e->tcp_flags = p->tcp_flags;
	e->icmp_type = p->icmp_type;
	e->direction = dir;
	e->endpoint = skb->cb[CB_ENDPOINT];
	e->length = skb->len;
	e->ethertype = skb->protocol;
	bpf_skb_load_bytes(skb, ETH_ALEN, e->src_mac, ETH_ALEN);
	return e;
}

/* Only right after policy was asked about the very packet is its judgment of it.
 * Return: the judgment; never NULL. */
inline_fn struct judgment *event_judged(struct event *e)
{
	__u32 zero = 0;
	struct judgment *j = bpf_map_lookup_elem(&mst_judgment_v1, &zero);

	if (!j)
		return NULL;
	e->set[VERDICT_EGRESS] = j->set[VERDICT_EGRESS];
	e->set[VERDICT_INGRESS] = j->set[VERDICT_INGRESS];
	e->rule[VERDICT_EGRESS] = j->rule[VERDICT_EGRESS];
	e->rule[VERDICT_INGRESS] = j->rule[VERDICT_INGRESS];
	return j;
}

/* Policy sees the backend, which the packet does not show yet. */
inline_fn void event_judged_stopped(struct event *e)
{
	struct judgment *j = event_judged(e);

	if (!j || !addr_equal(&e->t.src, &j->opener)) /* an answer is from where it says */
		return;
	e->target = j->responder;
	e->target_port = bpf_htons(j->port);
	e->src_endpoint = j->opener_id;
	e->dst_endpoint = j->responder_id;
}

/**
 * event_stopped - tell that a packet does not pass
 * @verdict: enum event_verdict
 *
 * Reads the packet anew, for it may be dropped before it was understood.
 */
global_fn int event_stopped(struct __sk_buff *skb, __u32 reason, __u32 dir, __u32 verdict, __u32 now)
{
	struct event_room *room = event_room();
	__u32 whom = room ? stopped_for(room, now) : 0;
	struct event *e;
	struct pkt *p;

	if (!room || !whom)
		return 0;
	p = (struct pkt *)room->pkt;
	__builtin_memset(p, 0, sizeof(*p));
	parse(skb, p);
	e = event_of(skb, p, dir);
	if (!e)
		return 0;
	e->kind = EVENT_STOPPED;
	e->verdict = verdict;
	e->reason = reason;
	e->src_endpoint = endpoint_of(&e->t.src);
	e->dst_endpoint = endpoint_of(&e->t.dst);
	if (reason == REASON_POLICY_INGRESS || reason == REASON_POLICY_EGRESS || reason == REASON_POLICY_INCOMPLETE)
		event_judged_stopped(e);
	return event_stopped_send(e, whom, now);
}
