// SPDX-License-Identifier: Apache-2.0

// Package page opens the bench's report in headless Chromium as readers do: on a
// desk and on a phone, by day and by night, without a network, by keyboard alone.
// It is a module of its own, so that mustang's has no browser in it.
package page

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// example is the page of a run of every article: it has all that a page can have.
const example = "../../docs/bench-example.html"

var (
	widths  = map[string]int64{"desktop": 1280, "phone": 390} // CSS pixels
	schemes = []string{"light", "dark"}
)

func TestPage(t *testing.T) {
	if _, err := exec.LookPath("chromium"); err != nil {
		t.Skip("no chromium: install the package chromium")
	}
	file, err := filepath.Abs(example)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); err != nil {
		t.Fatal(err)
	}
	browser := start(t)
	for device, width := range widths {
		for _, scheme := range schemes {
			t.Run(device+"/"+scheme, func(t *testing.T) {
				p := open(t, browser, "file://"+file, width, scheme)
				p.asksForNothing()
				p.fits(width)
				p.canBeRead()
				p.byKeyboard()
			})
		}
	}
}

// patience is that with a browser on a busy machine.
const patience = 2 * time.Minute

// start runs the browser, which ends with the test.
func start(t *testing.T) context.Context {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath("chromium"), chromedp.NoSandbox, // root has no sandbox
		chromedp.UserDataDir(t.TempDir()), chromedp.WSURLReadTimeout(patience))
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	if err := chromedp.Do(ctx); err != nil {
		t.Fatalf("start chromium: %v", err)
	}
	return ctx
}

// page is one open page.
type page struct {
	t   *testing.T
	ctx context.Context
}

func open(t *testing.T, browser context.Context, url string, width int64, scheme string) *page {
	t.Helper()
	ctx, cancel := chromedp.NewContext(browser)
	t.Cleanup(cancel)
	if err := chromedp.Do(ctx); err != nil { // the tab lives as long as the context of its first action
		t.Fatal(err)
	}
	p := &page{t: t, ctx: ctx}
	p.do(func(ctx context.Context, tab *chromedp.Target) (chromedp.Void, error) {
		_, err := cdp.Call(ctx, tab, emulation.SetDeviceMetricsOverride,
			emulation.SetDeviceMetricsOverrideParams{Width: width, Height: 844, DeviceScaleFactor: 1, Mobile: width < 600})
		if err == nil {
			_, err = cdp.Call(ctx, tab, emulation.SetEmulatedMedia,
				emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
		}
		return chromedp.Void{}, err
	}, chromedp.Navigate(url))
	return p
}

func (p *page) do(actions ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		p.t.Fatal(err)
	}
}

// eval returns the value of an expression.
func eval[T any](p *page, script string) T {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](script))
	if err != nil {
		p.t.Fatal(err)
	}
	return value
}

// asksForNothing: the page is one file.
func (p *page) asksForNothing() {
	p.t.Helper()
	if asked := eval[[]string](p, `performance.getEntriesByType('resource').map(e => e.name)`); len(asked) > 0 {
		p.t.Errorf("the page asks for %s", asked)
	}
}

// fits: what is wider than the window scrolls by itself, the page does not.
func (p *page) fits(width int64) {
	p.t.Helper()
	if wide := eval[int64](p, `document.documentElement.scrollWidth`); wide > width {
		p.t.Errorf("the page is %d pixels wide in a window of %d", wide, width)
	}
}

// canBeRead: each piece of text stands out from what is behind it as WCAG 2 asks at its level AA.
func (p *page) canBeRead() {
	p.t.Helper()
	if dim := eval[[]string](p, dimText); len(dim) > 0 {
		p.t.Errorf("text without enough contrast: %s", strings.Join(dim, "; "))
	}
}

// dimText lists texts of less contrast than 4.5 to 1, or 3 to 1 when they are large, one of each colour.
const dimText = `(() => {
  const parse = c => (c.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const part = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => .2126 * part(c[0]) + .7152 * part(c[1]) + .0722 * part(c[2]);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const found = new Map();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n; n = walk.nextNode();) {
    const e = n.parentElement;
    if (!n.data.trim() || e.closest('style, svg, .hear')) continue;
    const style = getComputedStyle(e), a = light(parse(style.color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const large = parseFloat(style.fontSize) >= 24 || parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 600;
    if (ratio < (large ? 3 : 4.5)) found.set(style.color, e.tagName + '.' + e.className + ' ' + ratio.toFixed(2) + ' "' + n.data.trim().slice(0, 30) + '"');
  }
  return [...found.values()];
})()`

// byKeyboard: Tab reaches everything that opens, leads somewhere or scrolls, in the page's own order, and
// shows where it is; Enter opens what is folded; the first Tab offers the way past the head.
func (p *page) byKeyboard() {
	p.t.Helper()
	want, got := eval[[]string](p, numberStops), []string(nil)
	if len(want) < 5 {
		p.t.Fatalf("only %d things to reach: %v", len(want), want)
	}
	for range want {
		p.do(chromedp.KeyEvent(kb.Tab))
		at := eval[focus](p, whereFocusIs)
		if got = append(got, at.Name); !at.Outline {
			p.t.Errorf("nothing shows that %s has the focus", at.Name)
		}
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		p.t.Errorf("Tab goes\n%s\nwhere the page has\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	folded := eval[int](p, `document.querySelectorAll('details').length`)
	for i := range folded {
		eval[bool](p, fmt.Sprintf(`document.querySelectorAll('summary')[%d].focus() || true`, i))
		p.do(chromedp.KeyEvent(kb.Enter))
	}
	if open := eval[int](p, `document.querySelectorAll('details[open]').length`); open != folded || folded == 0 {
		p.t.Errorf("Enter opened %d of %d", open, folded)
	}
}

// focus is where the keyboard is, and whether one sees it.
type focus struct {
	Name    string
	Outline bool
}

// numberStops gives each thing that a reader may want to reach a number, and lists them.
const numberStops = `(() => [...document.querySelectorAll('a[href], summary, [tabindex="0"]')]
  .filter(e => !e.closest('details:not([open])') || e.tagName == 'SUMMARY' && !e.parentElement.parentElement.closest('details:not([open])'))
  .map((e, i) => e.dataset.stop = i + ' ' + e.tagName + ' ' + (e.getAttribute('aria-label') || e.textContent).trim().slice(0, 40)))()`

const whereFocusIs = `(() => {
  const e = document.activeElement, s = getComputedStyle(e);
  return {Name: e.dataset.stop || e.tagName, Outline: s.outlineStyle != 'none' && parseFloat(s.outlineWidth) >= 1};
})()`
