// SPDX-License-Identifier: Apache-2.0

package report

import (
	"bytes"
	"encoding/xml"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func htmlOf(t *testing.T, d *Document) string {
	t.Helper()
	var b bytes.Buffer
	if err := d.WriteHTML(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestPageNeedsNothingElse(t *testing.T) {
	d := run(1, nil)
	d.Failures = map[string]string{"macvlan <nft>": "no \"parent\""}
	text := htmlOf(t, d)
	for _, bad := range []string{"http:", "https:", "<script", "<link", "@import", "url(", "src=", "ZgotmplZ", "<nft>", "NaN"} {
		if strings.Contains(text, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	for _, want := range []string{"veth mustang-tc, ClusterIP", "PASS", "0.92 [0.9", "Raw figures", "macvlan &lt;nft&gt;", "prefers-color-scheme: dark"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	for _, m := range regexp.MustCompile(`(?:left|width|top):(-?[0-9.]+)%`).FindAllStringSubmatch(text, -1) {
		if strings.HasPrefix(m[1], "-") {
			t.Errorf("a mark stands outside of its chart: %s", m[0])
		}
	}
}

func TestPageDrawsCurvesOverServices(t *testing.T) {
	d := run(1, nil)
	for _, s := range d.Subjects {
		if s.By != "iptables-nft" || s.Via != ClusterIP {
			continue
		}
		for _, position := range []string{Middle, Last} {
			many := s
			many.ID, many.Services, many.Position = s.ID+position, 5000, position
			d.Subjects = append(d.Subjects, many)
			for _, sample := range d.Samples {
				if sample.Subject == s.ID {
					sample.Subject, sample.Rate = many.ID, sample.Rate/2
					d.Samples = append(d.Samples, sample)
				}
			}
		}
	}
	text := htmlOf(t, d)
	if n := strings.Count(text, "<polyline"); n != 2*3 { // RR and CRR; the middle, the last, and mustang's single point
		t.Errorf("%d curves, want 6", n)
	}
	// What is inside the drawing is well-formed.
	for _, svg := range regexp.MustCompile(`(?s)<svg.*?</svg>`).FindAllString(text, -1) {
		for dec := xml.NewDecoder(strings.NewReader(svg)); ; {
			if _, err := dec.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("%v in %s", err, svg)
			}
		}
	}
}

func TestPageOfAnEmptyRun(t *testing.T) {
	d := sampleDocument(0)
	d.Complete = false
	d.Compute()
	if text := htmlOf(t, d); !strings.Contains(text, "cut short") {
		t.Error("an empty run's page does not say so")
	}
}

func TestLinesOfScannedRulesGoByTheirPlace(t *testing.T) {
	for _, c := range []struct {
		by, position string
		want         []string
	}{
		{"kube-proxy-iptables-legacy", Last, []string{"veth kube-proxy-iptables-legacy, last"}},
		{"kube-proxy-iptables", "", []string{"veth kube-proxy-iptables, middle", "veth kube-proxy-iptables, last"}},
		{"iptables-nft", Middle, []string{"veth iptables-nft, middle"}},
		{"kube-proxy-nftables", "", []string{"veth kube-proxy-nftables"}},
	} {
		if diff := cmp.Diff(c.want, lineNames(Subject{Mode: Veth, Via: ClusterIP, By: c.by, Position: c.position})); diff != "" {
			t.Errorf("%s %s:\n%s", c.by, c.position, diff)
		}
	}
}
