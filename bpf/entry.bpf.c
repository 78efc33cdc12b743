// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * What is attached to an interface: it knows which endpoint it serves and calls
 * the shared program, which was verified once for the node.
 */
#include "lib/common.h"
#include "lib/drop.h"

const volatile __u32 endpoint_id = 0;
const volatile __u32 program = 0; /* enum pod_program */

SEC("tc")
int entry(struct __sk_buff *skb)
{
	skb->cb[CB_ENDPOINT] = endpoint_id;
	bpf_tail_call(skb, &mst_programs_v1, program);
	return drop(skb, REASON_NO_PROGRAM, program & 1 ? DIR_TO_POD : DIR_FROM_POD);
}

char __license[] SEC("license") = "Dual BSD/GPL";
