// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * What is attached to an interface: it knows which endpoint it serves and calls
 * the shared program, which was verified once for the node.
 */
#include "lib/common.h"
#include "lib/count.h"
#include "lib/voucher.h"

/*
 * Placeholders in the instructions, which the loader writes over: constants in
 * .rodata would cost each attachment a table of its own.
 */
#define ENDPOINT_ID ({ __u64 v; asm volatile("%0 = 0x6d73740000000001 ll" : "=r"(v)); (__u32)v; })
#define PROGRAM ({ __u64 v; asm volatile("%0 = 0x6d73740000000002 ll" : "=r"(v)); (__u32)v; })

inline_fn int call(struct __sk_buff *skb, __u32 endpoint_id)
{
	__u32 program = PROGRAM; /* enum pod_program */

	if ((program == PROG_TO_POD_INNER || program == PROG_TO_POD_NETKIT) &&
	    vouched(skb, endpoint_id, program == PROG_TO_POD_INNER)) {
		count_to_pod(endpoint_id, skb->len);
		return NEXT;
	}
	skb->cb[CB_ENDPOINT] = endpoint_id;
	bpf_tail_call(skb, &mst_programs_v1, program);
	count_drop(skb, REASON_NO_PROGRAM, program & 1 ? DIR_TO_POD : DIR_FROM_POD);
	return TC_ACT_SHOT;
}

/* Behind a link: loaded once for each attachment. */
SEC("tc")
int entry(struct __sk_buff *skb)
{
	return call(skb, ENDPOINT_ID);
}

/* Behind filters: loaded once for the node, because a filter has a number of its own, its class
 * id, of which a packet carries 16 bits.
 */
SEC("tc")
int filter_entry(struct __sk_buff *skb)
{
	return call(skb, skb->tc_classid);
}

char __license[] SEC("license") = "Dual BSD/GPL";
