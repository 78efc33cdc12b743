/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Load balancing: frontend → Service → slot → backend. */
#pragma once

#include "common.h"
#include "parse.h"

/* Whether some frontend has a port, or once had, or flows wear it, or once did. */
inline_fn bool told_port(__u16 port)
{
	__u32 word = port / 64;
	__u64 *had = bpf_map_lookup_elem(&mst_frontend_ports_v1, &word);

	return !had || *had >> (port % 64) & 1;
}

/* Whether a frontend with the port has gone. Its connections go on. */
inline_fn bool gone_port(__be16 dport)
{
	__u16 port = bpf_ntohs(dport);
	__u32 word = port / 64;
	__u64 *had = bpf_map_lookup_elem(&mst_gone_ports_v1, &word);

	return !had || *had >> (port % 64) & 1;
}

/**
 * service_at - the Service whose frontend a key is
 * @key: its scope is set here
 * @scope: SCOPE_OUTSIDE for a client outside the cluster; of SCOPE_ANY and those of loopback, that alone
 *
 * Return: NULL when there is none.
 */
inline_fn struct service *service_at(struct service_key *key, __u8 scope)
{
	struct service *s;

	key->scope = scope == SCOPE_OUTSIDE ? SCOPE_ANY : scope;
	s = grown_find(&mst_services_v2_now, key);
	if (!s || scope != SCOPE_OUTSIDE || !(s->flags & SVC_SPLIT))
		return s;
	key->scope = SCOPE_OUTSIDE;
	return grown_find(&mst_services_v2_now, key);
}

/**
 * service_of_address - the same where the key itself is no frontend
 * @address: where the flags of the address go, 0 when it has no frontend
 */
inline_fn struct service *service_of_address(struct service_key *key, __u8 scope, __u16 *address)
{
	struct service_key whole = { .addr = key->addr };
	struct service *mark = grown_find(&mst_services_v2_now, &whole);

	if (!mark)
		return NULL;
	*address = mark->flags;
	if (!(*address & SVC_NODE))
		return NULL;
	if (addr_is_ipv4(&key->addr))
		key->addr.words[3] = 0;
	else
		key->addr.quads[0] = key->addr.quads[1] = 0;
	return service_at(key, scope);
}

/* The Service behind an address, port and protocol, as service_at() and then service_of_address(). */
inline_fn struct service *service_find(const struct addr *a, __be16 port, __u8 proto, __u8 scope,
				       __u16 *address)
{
	struct service_key key = { .addr = *a, .port = port, .proto = proto };
	struct service *s = service_at(&key, scope);

	*address = 0;
	return s ? s : service_of_address(&key, scope, address);
}

/* Whether the client may use the Service, as far as its address goes. */
slow_fn bool source_allowed(const struct service *s, const struct addr *client)
{
	struct source_key key = { .prefixlen = 32 + 64 + 128, .group = s->group, .addr = *client };

	return net_holds(bpf_map_lookup_elem(&mst_sources_v1, &key), client);
}

/**
 * service_closed - why a Service takes nobody, or not this client
 * Return: enum drop_reason. For REASON_NO_BACKEND the client is told, else not.
 */
inline_fn int service_closed(const struct service *s, const struct addr *client)
{
	if (s->flags & SVC_RANGES && !source_allowed(s, client))
		return REASON_SOURCE_RANGE;
	if (s->flags & SVC_DROP)
		return REASON_NO_LOCAL_BACKEND;
	return s->backends ? REASON_NONE : REASON_NO_BACKEND;
}

/* As service_closed, of a packet: who may not know of the Service hears nothing of it. */
inline_fn int service_refuses(const struct service *s, const struct pkt *p)
{
	int reason = service_closed(s, &p->t.src);

	return opens(p) || (reason && reason != REASON_NO_BACKEND) ? reason : REASON_MIDSTREAM_NAT;
}

/* Return: a number that is the same on every node for a flow's first packet. */
inline_fn __u32 flow_hash(const struct tuple *t, __u8 proto)
{
	__u64 h = proto;

	h = (h ^ t->src.quads[0]) * 0x9e3779b97f4a7c15;
	h = (h ^ h >> 32 ^ t->src.quads[1]) * 0x9e3779b97f4a7c15;
	h = (h ^ h >> 32 ^ t->dst.quads[0]) * 0x9e3779b97f4a7c15;
	h = (h ^ h >> 32 ^ t->dst.quads[1]) * 0x9e3779b97f4a7c15;
	h = (h ^ h >> 32 ^ ((__u32)t->sport << 16 | t->dport)) * 0x9e3779b97f4a7c15;
	return h >> 32;
}

/* When an affinity that starts now ends. */
inline_fn __u32 affinity_end(const struct service *s, __u32 now)
{
	return now + ((__u64)s->affinity * 1000000000 >> SECOND_SHIFT) + 1;
}

/* The backend that a client was led to, while the affinity lasts, by the time-out of then and of now, and the Service has
 * it. By another CPU's clock the next second may have begun. */
slow_fn struct backend *affinity_find(const struct service *s, const struct affinity_key *key, __u32 *id)
{
	struct affinity *mine = bpf_map_lookup_elem(&mst_affinity_v1, key);
	struct slot_key member = { .service = s->id };
	__u32 now = now_seconds();
	struct backend *b;

	if (!mine || (__s32)(mine->expires - now) < 0 || (__s32)(mine->expires - affinity_end(s, now)) > 1)
		return NULL;
	member.slot = SLOT_MEMBER | mine->backend;
	if (!grown_find(&mst_slots_v1_now, &member))
		return NULL;
	*id = mine->backend;
	b = grown_find(&mst_backends_v1_now, id);
	if (b)
		mine->expires = affinity_end(s, now);
	return b;
}

/* An affinity begins. @id: of the backend that was picked. Return: the backend that another CPU has led the client to
 * meanwhile; NULL: none. */
slow_fn struct backend *affinity_begin(const struct service *s, const struct affinity_key *key, __u32 *id)
{
	struct affinity mine = { .backend = *id, .expires = affinity_end(s, now_seconds()) };
	struct backend *other;

	if (!bpf_map_update_elem(&mst_affinity_v1, key, &mine, BPF_NOEXIST))
		return NULL;
	other = affinity_find(s, key, id);
	if (other)
		return other;
	*id = mine.backend;
	bpf_map_update_elem(&mst_affinity_v1, key, &mine, BPF_ANY); /* in place of one that holds no more */
	return NULL;
}

slow_fn struct backend *slot_backend(const struct service *s, __u32 slot, __u32 *id)
{
	struct slot_key key = { .service = s->id, .slot = slot };
	__u32 *found = grown_find(&mst_slots_v1_now, &key);

	/* One can be missing for the instant in which the set shrinks; slot 0 is the last to go. */
	if (!found && slot) {
		key.slot = 0;
		found = grown_find(&mst_slots_v1_now, &key);
	}
	if (!found)
		return NULL;
	*id = *found;
	return grown_find(&mst_backends_v1_now, id);
}

/**
 * backend_pick - a backend of a Service for a new flow
 * @client: whose affinity counts
 * @hash: of the flow, for Maglev
 * @id: where the backend's id goes
 *
 * Return: NULL when the Service has none.
 */
inline_fn struct backend *backend_pick(const struct service *s, const struct addr *client, __u32 hash,
				       __u32 *id)
{
	struct affinity_key key = { .client = *client, .group = s->group };
	__u32 n = s->backends, slot = 0;
	struct backend *b, *other;

	if (!n)
		return NULL;
	if (s->affinity) {
		b = affinity_find(s, &key, id);
		if (b)
			return b;
	}
	if (n > 1)
		slot = (s->flags & SVC_MAGLEV ? hash : bpf_get_prandom_u32()) % n;
	b = slot_backend(s, slot, id);
	if (b && s->affinity) {
		other = affinity_begin(s, &key, id);
		if (other)
			return other;
	}
	return b;
}
