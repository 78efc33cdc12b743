// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Load is what clients met in one way of asking.
type Load struct {
	How    string         `json:"how"` // new: a connection for each question; kept: one for all; udp
	Asked  int            `json:"asked"`
	Failed map[string]int `json:"failed,omitempty"` // by what went wrong
	P50    time.Duration  `json:"p50"`
	P99    time.Duration  `json:"p99"`
	Max    time.Duration  `json:"max"`
}

// patient is how long a question waits for its answer: longer than a process of a
// busy machine waits for a processor. What is lost for good fails all the same.
const patient = 20 * time.Second

// Generate asks target in every way at once until ctx ends, each client at the
// rate: by the clock, so that a stall is as many late questions as it was long.
func Generate(ctx context.Context, target string, clients, rate int) []Load {
	ways := map[string]func(context.Context, string) (ask func() error, done func()){"new": connectEach, "kept": keepOne, "udp": datagrams}
	var out []Load
	var mu sync.Mutex
	var wg sync.WaitGroup
	for how, way := range ways {
		load, took := Load{How: how, Failed: map[string]int{}}, []time.Duration(nil)
		var each sync.WaitGroup
		for range clients {
			each.Go(func() {
				ask, done := way(ctx, target)
				defer done()
				next := time.Now()
				for ctx.Err() == nil {
					err := ask()
					if ctx.Err() != nil {
						return
					}
					mu.Lock()
					load.Asked++
					if err != nil {
						load.Failed[kind(err)]++
					} else {
						took = append(took, time.Since(next))
					}
					mu.Unlock()
					if next = next.Add(time.Second / time.Duration(rate)); time.Now().Before(next) {
						time.Sleep(time.Until(next))
					}
				}
			})
		}
		wg.Go(func() {
			each.Wait()
			mu.Lock()
			defer mu.Unlock()
			if slices.Sort(took); len(took) > 0 {
				load.P50, load.P99, load.Max = took[len(took)/2], took[len(took)*99/100], took[len(took)-1]
			}
			out = append(out, load)
		})
	}
	wg.Wait()
	slices.SortFunc(out, func(a, b Load) int { return strings.Compare(a.How, b.How) })
	return out
}

// kind is an error without addresses and ports.
func kind(err error) string {
	switch {
	case errors.Is(err, unix.ECONNRESET):
		return "reset"
	case errors.Is(err, unix.ECONNREFUSED):
		return "refused"
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return "unreachable"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "closed"
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return err.Error()
}

// connectEach makes a connection for each question.
func connectEach(ctx context.Context, target string) (func() error, func()) {
	return func() error {
		ctx, cancel := context.WithTimeout(ctx, patient)
		defer cancel()
		_, err := askHTTP(ctx, target, 0)
		return err
	}, func() {}
}

// keepOne asks all questions on one connection, and makes another one only when
// it has failed.
func keepOne(ctx context.Context, target string) (func() error, func()) {
	var conn net.Conn
	var lines *bufio.Reader
	end := func() {
		if conn != nil {
			conn.Close()
			conn = nil
		}
	}
	return func() (err error) {
		if conn == nil {
			ctx, cancel := context.WithTimeout(ctx, patient)
			defer cancel()
			var d net.Dialer
			if conn, err = d.DialContext(ctx, "tcp", target); err != nil {
				conn = nil
				return err
			}
			lines = bufio.NewReader(conn)
		}
		_ = conn.SetDeadline(time.Now().Add(patient))
		if _, err = fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: peer\r\n\r\n"); err == nil {
			err = readAnswer(lines)
		}
		if err != nil {
			end()
		}
		return err
	}, end
}

func readAnswer(lines *bufio.Reader) error {
	answer, err := http.ReadResponse(lines, nil)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return errors.Join(err, answer.Body.Close())
}

// datagrams sends each question from one socket, which is connected once, as a
// resolver's may be.
func datagrams(ctx context.Context, target string) (func() error, func()) {
	var conn net.Conn
	end := func() {
		if conn != nil {
			conn.Close()
			conn = nil
		}
	}
	return func() (err error) {
		if conn == nil {
			var d net.Dialer
			if conn, err = d.DialContext(ctx, "udp", target); err != nil {
				conn = nil
				return err
			}
		}
		_ = conn.SetDeadline(time.Now().Add(patient))
		buf := make([]byte, 512)
		if _, err = conn.Write([]byte("?")); err == nil {
			_, err = conn.Read(buf)
		}
		if err != nil {
			end()
		}
		return err
	}, end
}
