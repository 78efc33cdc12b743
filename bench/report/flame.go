// SPDX-License-Identifier: Apache-2.0

package report

// Flame graphs and CPU bars.

import (
	"bytes"
	"cmp"
	"encoding/xml"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// Sizes of a flame graph, in its own units.
const (
	flameWidth = 1200
	flameRow   = 17
	flameFoot  = 4
	letter     = 6.6 // of the font
)

// flame is a flame graph on the page.
type flame struct {
	Anchor, Title string
	SVG           template.HTML // made below, of escaped text
	Top           []topRow
}

// topRow is a function by what it spends itself.
type topRow struct{ Name, Share string }

// bill is what a fixed rate costs each subject.
type bill struct {
	Title string
	Rows  []billRow
}

type billRow struct {
	Name, Text string
	Width      float64 // percent
	IsMustang  bool
}

// split is where the CPU of a profile was.
type split struct {
	Title                 string
	User, System, Softirq float64 // percent
	Text                  string
}

func (d *Document) bill(f *Figures, m Metric, cores string) (bill, bool) {
	s, ok := scaled[m.kind()]
	if !ok || d.Settings.Article == "" {
		return bill{}, false
	}
	b := bill{Title: s.of + strings.TrimPrefix(head(m), kindHeads[m.kind()]) + ", both ends, " + cores + " core"}
	most := 0.0
	var values []float64
	for _, subject := range d.Subjects {
		v := f.Median(subject.ID, m, cores) * s.by
		if subject.ID == d.AgainID() || math.IsNaN(v) {
			continue
		}
		most = max(most, v)
		values = append(values, v)
		b.Rows = append(b.Rows, billRow{Name: subject.ID, Text: fmt.Sprintf("%.2f", v), IsMustang: IsMustang(subject.By)})
	}
	for i, v := range values {
		b.Rows[i].Width = math.Round(1000*v/most) / 10
	}
	return b, len(values) > 0
}

func (d *Document) splits() (out []split) {
	for _, p := range d.Profiles {
		out = append(out, split{Title: p.Subject + ", " + head(Metric(p.Scenario)), User: 100 * p.User, System: 100 * p.System, Softirq: 100 * p.Softirq,
			Text: fmt.Sprintf("usr %s, sys %s, softirq %s", percent(p.User), percent(p.System), percent(p.Softirq))})
	}
	return out
}

func (d *Document) flames(anchor string) (out []flame) {
	for i, p := range d.Profiles {
		if p.Stack == nil {
			continue
		}
		var b bytes.Buffer
		p.writeSVG(&b, false)
		out = append(out, flame{Anchor: fmt.Sprintf("%s-flame-%d", anchor, i), Title: p.title(), SVG: template.HTML(b.String()), Top: p.Stack.top(12)})
	}
	return out
}

func (p Profile) title() string { return p.Subject + ", " + head(Metric(p.Scenario)) }

// FileName is of the profile's flame graph, without its end.
func (p Profile) FileName() string {
	return strings.Trim(strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, p.Subject+"-"+p.Scenario), "-")
}

// WriteSVG writes the flame graph as a file of its own.
func (p Profile) WriteSVG(w io.Writer) error {
	var b bytes.Buffer
	p.writeSVG(&b, true)
	_, err := w.Write(b.Bytes())
	return err
}

// writeSVG draws the stacks, the outermost function at the foot. Alone, it brings what
// the page has: its name space, colours and a title.
func (p Profile) writeSVG(b *bytes.Buffer, alone bool) {
	height := p.Stack.Depth()*flameRow + flameFoot
	fmt.Fprintf(b, `<svg class="flame" viewBox="0 0 %d %d" role="img" aria-label="%s"`, flameWidth, height, escape("Flame graph: "+p.title()))
	if alone {
		fmt.Fprintf(b, ` xmlns="http://www.w3.org/2000/svg"><title>%s</title><style>svg{background:#fff}text{font:11px monospace;fill:#1b1f24}</style>`, escape(p.title()))
	} else {
		b.WriteString(">")
	}
	p.Stack.draw(b, 0, float64(flameWidth)/float64(p.Stack.Count), height-flameRow, p.Stack.Count)
	b.WriteString("</svg>")
}

func (f *Frame) draw(b *bytes.Buffer, x, scale float64, y, all int) {
	width := float64(f.Count) * scale
	fmt.Fprintf(b, `<g><title>%s, %.1f %%</title><rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`,
		escape(f.Name), 100*float64(f.Count)/float64(all), x, y, max(.5, width-.4), flameRow-1, colourOf(f.Name))
	if fits := int((width - 6) / letter); fits >= 4 {
		name := f.Name
		if utf8.RuneCountInString(name) > fits {
			name = string([]rune(name)[:fits-1]) + "…"
		}
		fmt.Fprintf(b, `<text x="%.1f" y="%d">%s</text>`, x+3, y+flameRow-5, escape(name))
	}
	b.WriteString("</g>")
	for _, c := range f.Calls {
		c.draw(b, x, scale, y-flameRow, all)
		x += float64(c.Count) * scale
	}
}

// colourOf gives kinds of functions their colours: programs of BPF, netfilter, queues,
// the rest of the network, all else. Text on them is dark.
func colourOf(name string) string {
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(name, p) })
	}
	switch {
	case strings.HasPrefix(name, "bpf:") || has("bpf_prog", "cls_bpf", "tcf_", "tcx_", "sch_handle"):
		return "#7db8f0"
	case has("nf_", "ipt_", "nft_", "iptable", "conntrack", "xt_"):
		return "#f0a08c"
	case has("backlog", "netif_rx", "softirq", "net_rx_action", "napi"):
		return "#f2d37a"
	case has("veth", "macvlan", "vxlan", "br_", "dev_", "netif_", "qdisc"):
		return "#a9d6a0"
	case has("tcp", "ip_", "ip6", "ipv6", "sock", "inet", "skb", "fib", "udp"):
		return "#d6cdb8"
	}
	return "#dcdfe4"
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder does not fail
	return b.String()
}

// top are the functions that spend most themselves.
func (f *Frame) top(n int) (out []topRow) {
	own := map[string]int{}
	f.own(own)
	var names []string
	for name := range own {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(own[b]-own[a], cmp.Compare(a, b)) })
	for _, name := range names[:min(n, len(names))] {
		out = append(out, topRow{name, fmt.Sprintf("%.1f %%", 100*float64(own[name])/float64(f.Count))})
	}
	return out
}

func (f *Frame) own(into map[string]int) {
	left := f.Count
	for _, c := range f.Calls {
		left -= c.Count
		c.own(into)
	}
	into[f.Name] += left
}
