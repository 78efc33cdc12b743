/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* From a device of the node into a pod: calling the program that judges it. And into the programs that
 * write to packets: by the kernel's hand each of these begins with making the packet its own, so what
 * has nothing to do is told by small ones that write nothing. */
#pragma once

#include "common.h"

/* Return: whether the endpoint's programs sit on a host end, through which redirect_peer leads. */
inline_fn bool behind_host_end(__u32 id)
{
	struct endpoint *ep = endpoint_slot(id);

	return ep && ep->generation && ep->flags & EP_HOST_END;
}

/**
 * node_call - go on in another program of the same device
 * @slot: enum node_program
 *
 * Return: only where there is none: the packet goes on as if nothing were here.
 */
inline_fn int node_call(struct __sk_buff *skb, __u32 slot)
{
	bpf_tail_call(skb, &mst_node_programs_v1, slot);
	return NEXT;
}

/**
 * enter_pod - hand a packet to the program that judges what enters a pod
 * @id: the endpoint
 * @ref: the node that sent it by the tunnel, 0: it came without
 *
 * Return: a tc verdict. Without the program the packet goes by the host's stack, and is judged at
 * the pod's own hook.
 */
inline_fn int enter_pod(struct __sk_buff *skb, __u32 id, __u32 ref)
{
	if (!behind_host_end(id))
		return NEXT;
	skb->cb[CB_ENDPOINT] = id;
	skb->cb[CB_REMOTE] = ref;
	bpf_tail_call(skb, &mst_programs_v1, PROG_TO_POD_WIRE);
	return NEXT;
}
