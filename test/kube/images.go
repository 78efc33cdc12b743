// SPDX-License-Identifier: Apache-2.0

// This file says what is in each image. Their names and versions are those
// that the end-to-end suite of Version asks for.

package kube

import (
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

const (
	pauseImage   = registry + "/pause:3.10.1"
	busyboxImage = registry + "/busybox:1.37.0-1"
	corednsImage = registry + "/coredns:1"
	// AgnhostImage is the suite's test server and client.
	AgnhostImage = registry + "/agnhost:2.56"
	// The suite asks for dig, which our agnhost image has.
	dnsutilsImage = registry + "/jessie-dnsutils:1.7"
)

// userland is what the agnhost image has of this machine: name there → program
// here. Everything else in its /bin is busybox. Not left to busybox: a shell,
// because busybox as a shell prefers its own nc and ip; wget, because
// `busybox wget -T` crashes in Debian 12; nc, ss, ip, dig, getent, because
// tests use options that busybox lacks.
var userland = map[string]string{
	"bash": "/bin/bash", "sh": "/bin/bash", "curl": "/usr/bin/curl", "wget": "/usr/bin/wget",
	"nc": "/bin/nc.openbsd", "ss": "/bin/ss", "ip": "/sbin/ip", "dig": "/usr/bin/dig",
	"iperf": "/usr/bin/iperf", "getent": "/usr/bin/getent", "busybox": busybox,
}

const busybox = "/bin/busybox"

// resolverLibs are opened by name when a program first resolves one: no
// program is linked with them.
const resolverLibs = "/lib/x86_64-linux-gnu/libnss_dns.so.2 /lib/x86_64-linux-gnu/libnss_files.so.2 /lib/x86_64-linux-gnu/libresolv.so.2"

func accounts(l *layer) {
	l.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
	l.text("/etc/group", "root:x:0:\nnobody:x:65534:\n")
	for _, dir := range []string{"/root", "/proc", "/sys", "/dev", "/run", "/var/run"} {
		l.dir(dir, 0o755)
	}
	l.dir("/tmp", 0o1777)
}

// busyboxTools links every tool of busybox that the image has no other for.
func busyboxTools(l *layer) error {
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("list the tools of %s: %w", busybox, err)
	}
	for tool := range strings.FieldsSeq(string(list)) {
		l.link("/bin/"+tool, "busybox")
	}
	return nil
}

func makePause(b *builder, out string) error {
	dir, err := b.kubernetesSource()
	if err != nil {
		return err
	}
	bin := filepath.Join(out, "pause")
	err = b.run("", "gcc", "-Os", "-static", "-s", "-DVERSION="+Version, "-o", bin, filepath.Join(dir, "build/pause/linux/pause.c"))
	if err != nil {
		return err
	}
	l := newLayer()
	l.file("/pause", bin, 0o755)
	return writeImage(filepath.Join(out, "pause.tar"), []string{pauseImage},
		imageConfig{Entrypoint: []string{"/pause"}, User: "65535:65535"}, l)
}

func makeBusybox(_ *builder, out string) error {
	l := newLayer()
	l.program("/bin/busybox", busybox) // Debian has a static one, and one that is not
	if err := busyboxTools(l); err != nil {
		return err
	}
	accounts(l)
	l.dir("/www", 0o755)
	return writeImage(filepath.Join(out, "busybox.tar"), []string{busyboxImage},
		imageConfig{Cmd: []string{"/bin/sh"}, Env: []string{"PATH=/bin"}}, l)
}

func makeCorednsImage(b *builder, out string) error {
	l := newLayer()
	l.file("/coredns", b.path("coredns", "coredns"), 0o755)
	return writeImage(filepath.Join(out, "coredns.tar"), []string{corednsImage},
		imageConfig{Entrypoint: []string{"/coredns"}}, l)
}

func makeAgnhostImage(b *builder, out string) error {
	source, err := b.kubernetesSource()
	if err != nil {
		return err
	}
	l := newLayer()
	l.file("/agnhost", b.path("agnhost", "agnhost"), 0o755)
	l.link("/agnhost-2", "agnhost")
	l.file("/coredns", b.path("coredns", "coredns"), 0o755)
	for _, name := range []string{"localhost.crt", "localhost.key"} {
		l.file(name, filepath.Join(source, "test/images/agnhost/porter", name), 0o644)
	}
	for _, name := range slices.Sorted(maps.Keys(userland)) {
		l.program("/bin/"+name, userland[name])
	}
	if err := busyboxTools(l); err != nil {
		return err
	}
	for lib := range strings.FieldsSeq(resolverLibs) {
		l.file(lib, lib, 0o755)
	}
	l.link("/usr/bin/dig", "/bin/dig")
	l.link("/usr/bin/getent", "/bin/getent")
	l.link("/usr/local/bin/iperf", "/bin/iperf")
	accounts(l)
	l.dir("/uploads", 0o1777)
	l.text("/etc/nsswitch.conf", "hosts: files dns\n")
	l.text("/etc/wgetrc", "tries = 1\n") // as busybox's wget, which tests are written for
	return writeImage(filepath.Join(out, "agnhost.tar"), []string{AgnhostImage, dnsutilsImage}, imageConfig{
		Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"},
		Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	}, l)
}
