// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// This file is the storm's servers and clients: programs that people run and load
// with, all Debian's. Their pods have the node's /usr and no image of their own.

// stormLoad is what clients met in one way of asking.
type stormLoad struct {
	How           string         `json:"how"`
	Asked         int            `json:"asked"`
	Failed        map[string]int `json:"failed"`
	P50, P99, Max time.Duration
}

// client is one load: what runs in its pod, and how its output is read.
type client struct {
	name, script string
	read         func(out string) ([]stormLoad, error)
}

// Rates are far below what the machine can do: what is looked for is what fails and
// what waits, not what is fast. Each client asks for %[1]d seconds.
var clients = []client{
	{"own", "", readOwn}, // `mustang connectivity load`: an image of its own
	{"wrk-kept", "wrk -t1 -c2 -d%[1]ds --timeout 20s -s /etc/storm/rate.lua http://10.96.9.1:80/", readWrk},
	{"wrk-new-v6", "wrk -t1 -c2 -d%[1]ds --timeout 20s -H 'Connection: close' -s /etc/storm/rate.lua 'http://[fd00:10:96::901]:80/'", readWrk},
	{"redis", `end=$(($(date +%%s) + %[1]d)); while [ $(date +%%s) -lt $end ]; do
		timeout 60 redis-benchmark -h 10.96.9.2 -t get -n 50 -c 2 -k 0 --csv 2>&1 || echo "failed $?"; sleep 1; done`, readRedis},
	{"pgbench", `cd /tmp; end=$(($(date +%%s) + %[1]d)); while [ $(date +%%s) -lt $end ]; do rm -f pg.*
		/usr/lib/postgresql/*/bin/pgbench -n -C -c 2 -R 10 -T 15 -l --log-prefix=pg -f /etc/storm/select.sql -h 10.96.9.3 -U postgres postgres 2>&1 | grep error: ; cat pg.*; done`, readPgbench},
	{"dnsperf", "dnsperf -v -s 10.96.9.4 -d /etc/storm/names -l %[1]d -Q 50 -c 2 -t 20", readDNSPerf},
}

// startServers returns when all serve, on n2.
func (c *testCluster) startServers() {
	c.apply(stormFiles + stormPods)
	c.apply(deployment("nginx", 2, stormServer+debian("exec nginx -c /etc/storm/nginx.conf")) +
		deployment("redis", 1, stormServer+debian("exec redis-server --save '' --protected-mode no --port 8080")) +
		deployment("postgres", 1, stormServer+debian(postgres)))
	for _, name := range []string{"server", "nginx", "redis", "postgres", "dns"} {
		c.run("kubectl", "rollout", "status", "deployment/"+name, "--timeout=3m")
	}
}

// startClients returns when all of them ask, on n1.
func (c *testCluster) startClients() {
	seconds := int(stormTime().Seconds())
	for _, l := range clients {
		pod := fmt.Sprintf(`
  image: "mustang-net/mustang:0.1.0"
  args: [connectivity, load, "--for=%ds", "10.96.9.9:80"]
`, seconds)
		if l.script != "" {
			pod = debian(fmt.Sprintf(l.script, seconds))
		}
		c.apply(stormClient(l.name, pod))
	}
	for _, l := range clients {
		c.run("kubectl", "wait", "--for=jsonpath={.status.phase}=Running", "pod/client-"+l.name, "--timeout=3m")
	}
}

// loads are the clients' results, when they have ended.
func (c *testCluster) loads() (list []stormLoad) {
	for _, l := range clients {
		pod := "pod/client-" + l.name
		if out, err := c.try("kubectl", "wait", "--for=jsonpath={.status.phase}=Succeeded", pod, "--timeout=3m"); err != nil {
			c.t.Errorf("%s: %v: %s", l.name, err, out)
		}
		out := c.run("kubectl", "logs", pod)
		some, err := l.read(out)
		if err != nil {
			c.t.Errorf("%s: %v\n%s", l.name, err, out[:min(len(out), 2000)])
		}
		for _, s := range some {
			s.How = strings.TrimSuffix(l.name+" "+s.How, " ")
			list = append(list, s)
		}
	}
	return list
}

func readOwn(out string) (list []stormLoad, err error) {
	return list, json.Unmarshal([]byte(out), &list)
}

// readWrk reads the line that rate.lua prints at the end.
func readWrk(out string) ([]stormLoad, error) {
	_, line, _ := strings.Cut(out, "result ")
	line, _, _ = strings.Cut(line, "\n")
	var r struct {
		Asked, Connect, Read, Write, Timeout, Status int
		P50, P99, Max                                float64 // µs
	}
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		return nil, err
	}
	µs := func(f float64) time.Duration { return time.Duration(f) * time.Microsecond }
	l := stormLoad{Asked: r.Asked, Failed: map[string]int{}, P50: µs(r.P50), P99: µs(r.P99), Max: µs(r.Max)}
	for kind, n := range map[string]int{"connect": r.Connect, "read": r.Read, "write": r.Write, "timeout": r.Timeout, "status": r.Status} {
		if n > 0 {
			l.Failed[kind] = n
		}
	}
	return []stormLoad{l}, nil
}

// readRedis: redis-benchmark ends at its first error, so a run of fifty fails as one.
// Its p99 is the longest but one of a hundred runs: there is none of all questions.
func readRedis(out string) ([]stormLoad, error) {
	l := stormLoad{Failed: map[string]int{}}
	var took []time.Duration
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		f := strings.Split(line, ",")
		switch {
		case strings.HasPrefix(line, `"GET"`) && len(f) == 8:
			longest, err := strconv.ParseFloat(strings.Trim(f[7], `"`), 64)
			if err != nil {
				return nil, err
			}
			l.Asked += 50
			took = append(took, time.Duration(longest*float64(time.Millisecond)))
		case strings.HasPrefix(line, "failed "):
			l.Asked += 50
			l.Failed[line]++
		}
	}
	l.spread(took)
	return []stormLoad{l}, nil
}

// readPgbench reads the errors, and of each transaction what it took, its connection
// included: the time from when the rate wanted it.
func readPgbench(out string) ([]stormLoad, error) {
	l := stormLoad{Failed: map[string]int{}}
	var took []time.Duration
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if strings.Contains(line, "error:") {
			l.Failed[strings.TrimSpace(line)]++
			l.Asked++
			continue
		}
		if len(f) < 6 {
			return nil, fmt.Errorf("a line of the log: %q", line)
		}
		µs, err := strconv.Atoi(f[2])
		if err != nil {
			return nil, err
		}
		l.Asked++
		took = append(took, time.Duration(µs)*time.Microsecond)
	}
	l.spread(took)
	return []stormLoad{l}, nil
}

var (
	dnsAnswer  = regexp.MustCompile(`(?m)^> (\S+) .*? (\d+\.\d+)$`)
	dnsSummary = regexp.MustCompile(`Queries (sent|lost): +(\d+)`)
)

// readDNSPerf reads each answer, and what was lost.
func readDNSPerf(out string) ([]stormLoad, error) {
	l := stormLoad{Failed: map[string]int{}}
	var took []time.Duration
	for _, m := range dnsAnswer.FindAllStringSubmatch(out, -1) {
		s, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return nil, err
		}
		if m[1] != "NOERROR" {
			l.Failed[m[1]]++
			continue
		}
		took = append(took, time.Duration(s*float64(time.Second)))
	}
	sums := dnsSummary.FindAllStringSubmatch(out, -1)
	if len(sums) != 2 {
		return nil, fmt.Errorf("no summary")
	}
	for _, m := range sums {
		n, err := strconv.Atoi(m[2])
		if err != nil {
			return nil, err
		}
		if m[1] == "sent" {
			l.Asked = n
		} else if n > 0 {
			l.Failed["lost"] = n
		}
	}
	l.spread(took)
	return []stormLoad{l}, nil
}

func (l *stormLoad) spread(took []time.Duration) {
	if slices.Sort(took); len(took) > 0 {
		l.P50, l.P99, l.Max = took[len(took)/2], took[len(took)*99/100], took[len(took)-1]
	}
}

// debian goes on a pod's last container: it runs a script with the node's own programs.
func debian(script string) string {
	return `
  image: "mustang.test/busybox:1.37.0-1"
  command: [/bin/sh, -c]
  args:
  - |
` + indent(4, script) + `
  env: [{name: PATH, value: "/bin:/usr/bin:/usr/sbin"}, {name: LC_ALL, value: C.UTF-8}]
  volumeMounts:
  - {name: usr, mountPath: /usr, readOnly: true}
  - {name: lib, mountPath: /lib, readOnly: true}
  - {name: lib64, mountPath: /lib64, readOnly: true}
  - {name: files, mountPath: /etc/storm, readOnly: true}
volumes:
- {name: usr, hostPath: {path: /usr}}
- {name: lib, hostPath: {path: /usr/lib}}
- {name: lib64, hostPath: {path: /usr/lib64}}
- {name: files, configMap: {name: storm}}
`
}

const postgres = `echo 'pg:x:70:70::/tmp:/bin/sh' >>/etc/passwd; chmod 1777 /tmp
cat >/tmp/start <<'END'
bin=$(echo /usr/lib/postgresql/*/bin)
$bin/initdb -D /tmp/db -A trust -N -U postgres >/dev/null
echo 'host all all all trust' >>/tmp/db/pg_hba.conf
exec $bin/postgres -D /tmp/db -h 0.0.0.0 -p 8080 -k /tmp -c fsync=off -c max_connections=60
END
exec /usr/bin/setpriv --reuid=70 --regid=70 --clear-groups sh /tmp/start`

// stormServer begins a pod on n2; its container's rest follows.
const stormServer = `
nodeName: n2
containers:
- name: server
  readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
  resources: ` + stormShare + `
`

// stormShare is what a pod whose answers are waited for asks of the processors: without
// it, it has next to nothing beside those that come and go.
const stormShare = `{requests: {cpu: 200m}}`

// stormClient is a pod whose container's rest is given. It is a pod's own process,
// since a stream of kubectl's would end with the kubelet.
func stormClient(name, rest string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: client-%s}
spec:
  nodeName: n1
  restartPolicy: Never
  containers:
  - name: client
    resources: %s
%s`, name, stormShare, indent(2, rest))
}

const stormFiles = `
apiVersion: v1
kind: ConfigMap
metadata: {name: storm}
data:
  select.sql: "SELECT 1;\n"
  names: "peer.storm.test A\n"
  Corefile: |
    .:8080 {
      hosts {
        192.0.2.1 peer.storm.test
      }
    }
  nginx.conf: |
    user root;
    worker_processes 1;
    daemon off;
    pid /tmp/nginx.pid;
    error_log stderr;
    events { worker_connections 512; }
    http {
      access_log off;
      client_body_temp_path /tmp/a; proxy_temp_path /tmp/b; fastcgi_temp_path /tmp/c; uwsgi_temp_path /tmp/d; scgi_temp_path /tmp/e;
      keepalive_requests 1000000000;
      keepalive_timeout 1h;
      server {
        listen 8080;
        listen [::]:8080;
        location / { return 200 "storm\n"; }
      }
    }
  rate.lua: |
    function delay() return 40 end
    function done(s, l, r)
      local e = s.errors
      print(string.format('result {"asked":%d,"connect":%d,"read":%d,"write":%d,"timeout":%d,"status":%d,"p50":%f,"p99":%f,"max":%f}',
        s.requests, e.connect, e.read, e.write, e.timeout, e.status, l:percentile(50), l:percentile(99), l.max))
    end
---
`

// stormPods are the servers that have images, all Services, and the pods that come
// and go. Kubernetes takes a node that has not reported for a while for dead, and the
// pods on it for not ready, which after a minute without the API server is every node:
// publishNotReadyAddresses, so that what is counted is the network's doing.
var stormPods = deployment("server", 2, `
nodeName: n2
containers:
- {name: peer, image: "mustang-net/mustang:0.1.0", args: [connectivity, serve], readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}, resources: `+stormShare+`}
`) + deployment("dns", 2, `
nodeName: n2
containers:
- {name: dns, image: "mustang.test/coredns:1", args: [-conf, /etc/storm/Corefile], volumeMounts: [{name: files, mountPath: /etc/storm}], readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}, resources: `+stormShare+`}
volumes: [{name: files, configMap: {name: storm}}]
`) + deployment("churn", 0, `
terminationGracePeriodSeconds: 0
automountServiceAccountToken: false
containers: [{name: pause, image: "mustang.test/pause:3.10.1"}]
`) + stormService("server", "10.96.9.9", "80", "80") + stormService("nginx", "10.96.9.1, 'fd00:10:96::901'", "80", "") +
	stormService("redis", "10.96.9.2", "6379", "") + stormService("postgres", "10.96.9.3", "5432", "") + stormService("dns", "10.96.9.4", "53", "53") + `
apiVersion: v1
kind: Service
metadata: {name: churn}
spec: {selector: {app: churn}, ports: [{port: 80}]}
`

// stormService leads a TCP port, and a UDP port if there is one, to 8080.
func stormService(name, ips, tcp, udp string) string {
	first, _, dual := strings.Cut(ips, ", ")
	ports := "{name: tcp, port: " + tcp + ", targetPort: 8080}"
	if udp != "" {
		ports += ", {name: udp, port: " + udp + ", targetPort: 8080, protocol: UDP}"
	}
	families := "SingleStack"
	if dual {
		families = "RequireDualStack"
	}
	return fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: %s}
spec:
  ipFamilyPolicy: %s
  clusterIP: %s
  clusterIPs: [%s]
  publishNotReadyAddresses: true
  selector: {app: %s}
  ports: [%s]
---`, name, families, first, ips, name, ports)
}
