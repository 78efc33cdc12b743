// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// NoisyShare is the share of the load's CPUs that others may use before a
// sample is marked noisy. It stays in: medians bear some, and leaving samples
// out by their look is how figures get made up.
const NoisyShare = 0.05

// userHz is the unit of /proc/stat; 100 on every architecture Linux has.
const userHz = 100

// busyTime returns the seconds that the given CPUs spent on anything but idling,
// including what the hypervisor took (steal).
func busyTime(cpus []int) float64 {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	return busyIn(string(b), cpus)
}

func busyIn(stat string, cpus []int) float64 {
	want := map[string]bool{}
	for _, c := range cpus {
		want[fmt.Sprintf("cpu%d", c)] = true
	}
	var ticks int64
	for line := range strings.Lines(stat) {
		f := strings.Fields(line)
		if len(f) < 9 || !want[f[0]] {
			continue
		}
		// user nice system [idle iowait] irq softirq steal; guest is in user.
		for _, i := range []int{1, 2, 3, 6, 7, 8} {
			n, _ := strconv.ParseInt(f[i], 10, 64)
			ticks += n
		}
	}
	return float64(ticks) / userHz
}

func load1() float64 {
	b, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(b), " ")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}
