/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Load balancing: frontend → Service → slot → backend. */
#pragma once

#include "common.h"

/**
 * service_find - the Service behind an address, port and protocol
 * Return: NULL when there is none.
 */
inline_fn struct service *service_find(const struct addr *a, __be16 port, __u8 proto)
{
	struct service_key key = { .addr = *a, .port = port, .proto = proto };

	return bpf_map_lookup_elem(&mst_services_v1, &key);
}

/* Return: whether any Service has this address. */
inline_fn bool service_address(const struct addr *a)
{
	return service_find(a, 0, 0);
}

/**
 * backend_pick - a backend of a Service, at random
 * @id: where the backend's id goes
 *
 * A slot can be missing for the instant in which the set shrinks; slot 0 is the last to go.
 * Return: NULL when the Service has none.
 */
inline_fn struct backend *backend_pick(const struct service *s, __u32 *id)
{
	struct slot_key key = { .service = s->id };
	__u32 n = s->backends, *found;

	if (!n)
		return NULL;
	if (n > 1)
		key.slot = bpf_get_prandom_u32() % n;
	found = bpf_map_lookup_elem(&mst_slots_v1, &key);
	if (!found && key.slot) {
		key.slot = 0;
		found = bpf_map_lookup_elem(&mst_slots_v1, &key);
	}
	if (!found)
		return NULL;
	*id = *found;
	return bpf_map_lookup_elem(&mst_backends_v1, id);
}
