// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// serving answers each connection by a word.
func serving(t *testing.T) (path string, end func() error) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- Serve(ctx, l, func(c *net.UnixConn) { io.WriteString(c, "here") }, func(err error) { t.Errorf("refused: %v", err) })
	}()
	end = func() error { stop(); return <-done }
	t.Cleanup(stop)
	return path, end
}

func read(t *testing.T, c net.Conn) {
	t.Helper()
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if got, err := io.ReadAll(c); string(got) != "here" {
		t.Fatalf("the answer is %q, %v", got, err)
	}
}

func dial(t *testing.T, path string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestOneThatAKilledAgentLeftIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for _, left := range []string{path, Beside(path)} {
		if err := os.WriteFile(left, nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Type() != os.ModeSocket || info.Mode().Perm() != 0o600 {
		t.Errorf("it is %v, %v", info.Mode(), err)
	}
	if _, err := os.Stat(Beside(path)); !os.IsNotExist(err) {
		t.Errorf("the one beside stays: %v", err)
	}
}

// Pins outlive a state directory that is removed, or another from this start on: the
// agent makes it.
func TestTheDirectoryIsMade(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	l, err := Listen(filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("it is %v, %v", info.Mode(), err)
	}
}

func TestServeEndsWithItsContext(t *testing.T) {
	path, end := serving(t)
	read(t, dial(t, path))
	if err := end(); err != nil {
		t.Fatal(err)
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		t.Error("somebody still listens")
	}
}

// A process that has no file left for a connection has one again later: nobody is
// lost, and the agent does not end.
func TestWithoutAFileLeftItWaits(t *testing.T) {
	path, end := serving(t)
	read(t, dial(t, path)) // all that the runtime opens itself is open
	var had unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &had); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	none := had
	none.Cur = uint64(fd) + 1 // all below are taken
	var fill []int
	for {
		f, err := unix.Dup(fd)
		if err != nil {
			t.Fatal(err)
		}
		if f > fd {
			unix.Close(f)
			break
		}
		fill = append(fill, f)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
	time.Sleep(3 * pause)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &had); err != nil {
		t.Fatal(err)
	}
	for _, f := range fill {
		unix.Close(f)
	}
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "client")
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	read(t, conn)
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// Somebody who clears the state directory away takes the path along, not the agent.
func TestAPathThatIsRemovedIsMadeAgain(t *testing.T) {
	defer func(was time.Duration) { look = was }(look)
	look = 10 * time.Millisecond
	path, end := serving(t)
	if err := os.RemoveAll(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	var c net.Conn
	for start := time.Now(); c == nil; time.Sleep(time.Millisecond) {
		var err error
		if c, err = net.Dial("unix", path); err != nil && time.Since(start) > 30*time.Second {
			t.Fatal(err)
		}
	}
	read(t, c)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Error(info, err)
	}
	if err := end(); err != nil {
		t.Error(err)
	}
}
