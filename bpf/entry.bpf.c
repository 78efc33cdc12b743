// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * What is attached to an interface: it knows which endpoint it serves and calls
 * the shared program, which was verified once for the node.
 */
#include "lib/common.h"
#include "lib/count.h"

/*
 * Placeholders in the instructions, which the loader writes over: constants in
 * .rodata would cost each attachment a table of its own.
 */
#define ENDPOINT_ID ({ __u64 v; asm volatile("%0 = 0x6d73740000000001 ll" : "=r"(v)); (__u32)v; })
#define PROGRAM ({ __u64 v; asm volatile("%0 = 0x6d73740000000002 ll" : "=r"(v)); (__u32)v; })

SEC("tc")
int entry(struct __sk_buff *skb)
{
	__u32 endpoint_id = ENDPOINT_ID;
	__u32 program = PROGRAM; /* enum pod_program */

	skb->cb[CB_ENDPOINT] = endpoint_id;
	bpf_tail_call(skb, &mst_programs_v1, program);
	count_drop(skb, REASON_NO_PROGRAM, program & 1 ? DIR_TO_POD : DIR_FROM_POD);
	return TC_ACT_SHOT;
}

char __license[] SEC("license") = "Dual BSD/GPL";
