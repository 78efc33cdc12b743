/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The short way of a pod's packets to other pods, from the SYN on: the flow's entry
 * lies at a place that is arithmetic (near.h), and says all that a packet needs.
 * A SYN between two pods that have just been judged, to the same port, is
 * entered at once. Whatever is unusual, or has to be judged, takes the long way.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "deliver.h"
#include "drop.h"
#include "events.h"
#include "fast.h"
#include "fib.h"
#include "nat.h"
#include "near.h"
#include "near_flow.h"
#include "nobody.h"
#include "plan.h"
#include "remote.h"
#include "way.h"

#define NEAR_SERVE (-101) /* no tc verdict: near_serve may know */

/* Whether two pods are connected alike: what one's program does with a packet to the other, the other's would. */
inline_fn bool alike(const struct endpoint *a, const struct endpoint *b)
{
	return a != b && !((a->flags ^ b->flags) & (EP_HOST_END | EP_IN_POD)) && (!in_pod || siblings(a, b));
}

/**
 * pair_keep - a new flow was judged, and let be
 * @generation: nobody_generation(), from before
 */
slow_fn int pair_keep(const struct plan *plan, const struct pkt *p, __u32 generation)
{
	struct pair *pair = pair_slot(&plan->post, plan->opener.endpoint);

	if (!pair)
		return 0;
	pair->src = p->t.src;
	pair->dst = plan->post.dst;
	pair->dport = plan->post.dport;
	pair->direct = plan->role == CT_DIRECT;
	pair->opener = plan->opener.endpoint;
	pair->opener_generation = plan->opener.generation;
	pair->responder = plan->responder.endpoint;
	pair->responder_generation = plan->responder.generation;
	pair->generation = generation;
	pair->until = now_ticks() + PAIR_LIFETIME;
	pair->last = 0;
	return 0;
}

/* Whether both ends of a pair are what they were when it was judged. @to: the responder's endpoint, NULL: a node has it */
inline_fn bool pair_holds(const struct pair *pair, const struct endpoint *self, struct endpoint **to)
{
	if (pair->opener_generation != self->generation)
		return false;
	if (!pair->responder) {
		*to = NULL;
		return !!remote_of(pair->responder_generation);
	}
	*to = endpoint_slot(pair->responder);
	return *to && (*to)->generation == pair->responder_generation;
}

/**
 * near_way_claim - where the way of a translated flow to another node is kept: a slot of this CPU's short
 * way, for its entry has no room
 * @p: not yet translated
 * @to: what it becomes
 *
 * Return: NULL when there is none.
 */
inline_fn struct fast_flow *near_way_claim(struct __sk_buff *skb, const struct pkt *p, const struct tuple *to)
{
	__u32 hook = fast_hook(skb->cb[CB_ENDPOINT], DIR_FROM_POD), slot = tuple_hash(&p->t);
	struct fast_flow *fast = fast_at(p, hook, &slot);
	/* Else it has begun anew, with another backend. */
	bool same = fast && fast->to.dport == to->dport && addr_equal(&fast->to.dst, &to->dst);

	if (!fast) {
		slot = fast_choose(p, hook);
		fast = fast_slot(slot);
		if (!fast)
			return NULL;
	}
	if (unlikely(!same)) {
		fast_claim_way(fast, &p->t, hook, p->proto);
		fast->flags = FAST_TRANSLATE;
		fast->to = *to;
	}
	way_slot_note(skb, slot);
	return fast;
}

/**
 * near_serve - begin a flow of a Service between two pods that have just been judged
 *
 * A plain Service: what asks for more than any backend goes the long way.
 *
 * Return: a tc verdict, SEND_OUT or FAST_NO.
 */
global_fn int near_serve(struct __sk_buff *skb, struct pkt *p, struct endpoint *self)
{
	__u32 now = now_seconds(), tables = tables_generation();
	struct service_key key;
	__u32 id = skb->cb[CB_ENDPOINT], backend, ref;
	struct near_place *here, *there;
	struct near_room before, after;
	struct near_flow *pre, *post;
	struct fast_flow *fast;
	struct endpoint *to = NULL;
	struct service *s;
	struct pair *pair;
	struct backend *b;
	struct tuple t;
	int reason;

	if (!p || !self || !(self->flags & EP_SERVICE_TC))
		return FAST_NO;
	t = p->t;
	key = (struct service_key){ .addr = p->t.dst, .port = p->t.dport, .proto = IPPROTO_TCP };
	s = service_at(&key, SCOPE_ANY);
	if (!s || s->flags || s->affinity || !s->backends)
		return FAST_NO;
	b = slot_backend(s, s->backends > 1 ? bpf_get_prandom_u32() % s->backends : 0, &backend);
	if (!b)
		return FAST_NO;
	t.dst = b->addr;
	t.dport = b->port;
	pair = pair_of(&t, id);
	here = near_place_of(&p->t);
	there = near_place_of(&t);
	if (!pair || !pair_holds(pair, self, &to) || !here || !there || here == there ||
	    near_known_elsewhere(here, &p->t, now) || (near_others(there, now) && near_lives_elsewhere(&t, now)))
		return FAST_NO;
	before = near_room_for(here, &p->t, now);
	after = near_room_for(there, &t, now);
	pre = before.flow;
	post = after.flow;
	if (!pre || !near_take(&after, now) || !post)
		return FAST_NO;
	if (!near_take(&before, now)) {
		post->e.expires = now - 1;
		return FAST_NO;
	}
	near_begin(post, &t, pair, CT_POST_NAT, backend);
	post->e.other = p->t;
	near_begin(pre, &p->t, pair, CT_PRE_NAT, backend);
	pre->e.other = t;
	barrier();
	near_live(post, now, tables);
	near_live(pre, now, tables);
	count_from_pod(id, skb->len);
	fast = in_pod || to ? NULL : near_way_claim(skb, p, &pre->e.other);
	if (fast)
		near_way_of_last(&fast->at.way, pair, &post->key, &pre->e.other, skb->cb[CB_WAY]);
	id = pair->responder;
	ref = pair->responder_generation;
	reason = translate(skb, p, &pre->e.other, false);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	return to ? deliver(skb, p, self, to, id, NULL) : send_out(skb, p, self, ref);
}

/**
 * near_open - begin a flow between two pods that have just been judged, the other one maybe of another node
 * @p: a SYN, as glance leaves it
 * @self: whose hook this is
 *
 * Return: a tc verdict, SEND_OUT, FAST_NO, or NEAR_SERVE.
 */
global_fn int near_open(struct __sk_buff *skb, struct pkt *p, struct endpoint *self)
{
	__u32 id = skb->cb[CB_ENDPOINT], now = now_seconds(), tables = tables_generation(), code;
	struct endpoint *to;
	struct pair *pair;

	if (!p || !self || !from_mac(skb, self->mac) || observed(now) || shadows_exist(now))
		return FAST_NO;
	pair = pair_of(&p->t, id);
	if (!pair || !pair->direct)
		return NEAR_SERVE;
	code = pair_holds(pair, self, &to) ? near_enter_pair(&p->t, pair, now, tables) : 0;
	if (!code)
		return FAST_NO;
	count_from_pod(id, skb->len);
	if (to)
		return deliver(skb, p, self, to, pair->responder, NULL);
	skb->cb[CB_WAY] = code;
	return send_out(skb, p, self, pair->responder_generation);
}

/* The tuple's flow, if it lies near. @code: set to its way's */
inline_fn struct near_flow *near_with_code(const struct tuple *t, __u32 *code)
{
	__u32 number = near_number(&t->src, &t->dst, t->sport, t->dport);
	struct near_place *place = near_place(number);
	bool hi;
	struct near_flow *n = place ? near_find(place, t, &hi) : NULL;

	*code = n ? way_near_code(number, n != &place->flows[0]) : 0;
	return n;
}

/* The tuple's flow, which lies near, has just been judged. One that counts as closed lives by each packet that is seen.
 * Return: its way's code. */
global_fn int near_keep(const struct tuple *t, __u32 tables)
{
	struct near_flow *n;
	__u32 code;

	if (!t)
		return 0;
	n = near_with_code(t, &code);
	if (n && !ct_closed(&n->e))
		near_renew(n, tables);
	return code;
}

/* A new flow is entered: of one without translation both halves are one. */
slow_fn int near_new(struct __sk_buff *skb, struct pkt *p, const struct plan *plan)
{
	__u32 code = near_keep(&p->t, p->tables);

	if (plan->role != CT_DIRECT)
		near_keep(&plan->post, p->tables);
	else if (!plan->responder.endpoint)
		skb->cb[CB_WAY] = code;
	return 0;
}

/* A packet's flow, which lies near and is known, was judged. Return: its way's code; 0 also when the packet does not
 * say what tables it was judged by: that of a fragment is its identification. */
inline_fn int near_known(const struct pkt *p)
{
	return p->shape ? near_keep(&p->t, p->tables) : 0;
}

/* Through the tunnel, the way that packets of its flow have just gone. @r: the node. Return: a tc verdict, or SEND_OUT. */
inline_fn int near_tunnel(struct __sk_buff *skb, const struct pkt *p, const struct way_kept *way, const struct remote *r)
{
	struct node_config *n = node_config();
	__u32 overhead = tunnel_overhead(r);
	int pushed;

	if (unlikely(!n || !way_holds(way, wire_length(skb, p) + overhead) || skb->len + overhead > 65535 || !hop_take(skb, p)))
		return SEND_OUT;
	pushed = tunnel_push(skb, n, r, p->ipv6);
	if (unlikely(pushed)) /* NEXT: by the device, a hop less */
		return pushed == NEXT ? SEND_OUT : pushed;
	return way_out_again(skb, way, tunnel_ipv6(r));
}

/**
 * near_far - a packet may go its flow's way to another node, which is not plain, or has to be asked for
 * @n: without translation
 *
 * Return: a tc verdict, or SEND_OUT.
 */
global_fn int near_far(struct __sk_buff *skb, struct pkt *p, struct near_flow *n, bool reply)
{
	struct remote *r;
	int verdict;

	if (!p || !n)
		return FAST_NO;
	p->remote = reply ? n->e.opener.generation : n->e.responder.generation;
	r = n->plain ? NULL : remote_of(p->remote);
	verdict = r && r->flags & REMOTE_TUNNEL ? near_tunnel(skb, p, way_near(n), r) : SEND_OUT;
	if (unlikely(verdict == SEND_OUT))
		near_with_code(&p->t, &skb->cb[CB_WAY]);
	return verdict;
}

/* Let a packet of a flow without translation go its way to another node. @n: its entry, which holds for this end */
inline_fn int near_out(struct __sk_buff *skb, struct pkt *p, struct near_flow *n, bool reply)
{
	struct way_kept *way = way_near(n);

	if (unlikely(!from_mac(skb, near_way_in(n)->macs) || !near_passes(n, p, reply)))
		return FAST_NO;
	count_from_pod(skb->cb[CB_ENDPOINT], skb->len);
	if (likely(n->plain && way_holds(way, wire_length(skb, p)) && hop_take(skb, p)))
		return way_out_again(skb, way, p->ipv6);
	return near_far(skb, p, n, reply);
}

/* The same to another pod of this node. */
inline_fn int near_deliver(struct __sk_buff *skb, struct pkt *p, struct near_flow *n, bool reply,
			   const struct ct_end *to)
{
	const struct pod_way *way = near_way_to(n, reply);

	if (unlikely(!from_mac(skb, near_way_to(n, !reply)->macs) || too_long(skb, n->mtu) || !near_passes(n, p, reply)))
		return FAST_NO;
	count_from_pod(skb->cb[CB_ENDPOINT], skb->len);
	return deliver_to(skb, to->endpoint, way->macs, way->ifindex);
}

/* The same to a sibling, from inside a pod. */
global_fn int near_send(struct __sk_buff *skb, struct pkt *p, struct near_flow *n, bool reply)
{
	__u32 sender = reply; /* as near_siblings has them */
	struct near_siblings *pods;
	const struct ct_end *to;

	if (!p || !n)
		return FAST_NO;
	opaque(sender); /* else the compiler knows that it is 0 or 1, and the verifier does not */
	sender &= 1;
	pods = near_siblings(n);
	to = reply ? &n->e.opener : &n->e.responder;
	if (unlikely(!to->endpoint || !from_mac(skb, pods->macs[sender]) || too_long(skb, n->mtu) || !near_passes(n, p, reply)))
		return FAST_NO;
	count_from_pod(skb->cb[CB_ENDPOINT], skb->len);
	if (unlikely(!address_to(skb, pods->macs[!sender])))
		return drop(skb, REASON_DELIVER, DIR_FROM_POD);
	vouch_again(skb, &pods->vouched[sender], to->endpoint, p->tcp_flags);
	return NEXT;
}

/* The same of a Service's flow: what its packets ask of both ends is not kept with it. */
global_fn int near_turn(struct __sk_buff *skb, struct pkt *p, struct near_flow *n, bool reply)
{
	const struct ct_end *other;
	struct endpoint *self, *to;
	int reason;

	if (!p || !n)
		return FAST_NO;
	other = reply ? &n->e.opener : &n->e.responder;
	self = endpoint_slot(skb->cb[CB_ENDPOINT]);
	to = endpoint_slot(other->endpoint);
	if (!self || !to || reply != (n->e.role == CT_POST_NAT) || (!other->endpoint && (in_pod || reply)))
		return FAST_NO;
	if (!from_mac(skb, self->mac) || (!in_pod && reply && unlikely(too_long(skb, to->mtu))) || !near_passes(n, p, reply))
		return FAST_NO;
	count_from_pod(skb->cb[CB_ENDPOINT], skb->len);
	if (!other->endpoint)
		near_way_claim(skb, p, &n->e.other);
	reason = translate(skb, p, &n->e.other, reply);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	return other->endpoint ? deliver(skb, p, self, to, other->endpoint, NULL) :
				 send_out(skb, p, self, other->generation);
}

/**
 * near_path - let a packet go the way of its flow, which lies near
 * @p: as glance leaves it, of TCP
 *
 * Return: a tc verdict, SEND_OUT or FAST_NO.
 */
inline_fn int near_path(struct __sk_buff *skb, struct pkt *p)
{
	const struct ct_end *mine, *other;
	struct near_place *place = near_place_of(&p->t);
	struct near_flow *n;
	bool reply;

	n = place ? near_find(place, &p->t, &reply) : NULL;
	if (unlikely(!n))
		return FAST_NO;
	reply ^= n->e.flags & CT_ORIGIN_IS_HI;
	opaque(reply);
	mine = &n->e.opener + reply;
	if (unlikely(!near_holds(n, tables_generation()) || mine->endpoint != skb->cb[CB_ENDPOINT]))
		return FAST_NO;
	if (unlikely(n->e.role != CT_DIRECT))
		return near_turn(skb, p, n, reply);
	if (in_pod)
		return near_send(skb, p, n, reply);
	other = &n->e.opener + !reply;
	return other->endpoint ? near_deliver(skb, p, n, reply, other) : near_out(skb, p, n, reply);
}

/* The same of any packet that begins nothing. */
inline_fn int near_way(struct __sk_buff *skb, struct pkt *p)
{
	if (dry_run || unlikely(p->proto != IPPROTO_TCP || !p->shape || (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN))
		return FAST_NO;
	return near_path(skb, p);
}

/* A packet that has no way: a SYN may begin a flow that has one. Return: as near_path. */
inline_fn int near_begins(struct __sk_buff *skb, struct pkt *p, struct endpoint *self)
{
	int verdict;

	if (dry_run || p->proto != IPPROTO_TCP || p->shape != SHAPE_OPENS || p->tcp_flags & TCP_ACK)
		return FAST_NO;
	verdict = near_open(skb, p, self);
	return verdict == NEAR_SERVE ? near_serve(skb, p, self) : verdict;
}
