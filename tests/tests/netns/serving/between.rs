//! A reverse proxy of others between edge and gateway: Caddy, which speaks HTTP/3 to the edge and HTTP/2 to the gateway's own listener.

use super::*;

/// The part of a URL that names the proxy.
const PROXY: &str = "10.0.1.2:8444";

/// A gateway whose listener only the proxy reaches, and a user with a key.
fn behind_proxy() -> (Desk, Process, String) {
    let (key, hash) = generate_token().unwrap();
    let policy = format!(
        "[[gateway.listener]]\naddress = \"127.0.0.1:8200\"\ntls = false\n\
         [[gateway.key]]\nname = \"ann\"\nsha256 = \"{}\"\n\
         [class.default]\nshortest_deadline_ms = 1\n[class.interactive]\nshortest_deadline_ms = 1\n\
         [[rule]]\nclass = \"interactive\"\nasked_class = \"interactive\"",
        hex(&hash)
    );
    let mut desk = Desk::with_large(1, 1, "", "", &policy);
    let site = &desk.site;
    let folder = site.path("").display().to_string();
    let caddyfile = format!(
        "{{\nadmin off\nauto_https off\ndefault_sni 10.0.1.2\n}}\n\
         https://{PROXY} {{\ntls {folder}/relay.pem {folder}/relay.key\nreverse_proxy h2c://127.0.0.1:8200\n}}\n"
    );
    let file = site.write("Caddyfile", &caddyfile).unwrap().display().to_string();
    let mut command = site.chain.relay.command(crate::interop::caddy()).unwrap();
    command.args(["run", "--adapter", "caddyfile", "--config", &file]);
    command.envs(["XDG_CONFIG_HOME", "XDG_DATA_HOME"].map(|name| (name, &folder)));
    let proxy = Process::start(command).unwrap();
    proxy.wait_for_line("serving initial configuration", SOON).unwrap();
    desk.edge.signal(libc::SIGTERM).unwrap();
    desk.edge.wait(SOON).unwrap();
    let gateway = format!("\"https://{PROXY}/.well-known/masque/udp/{{target_host}}/{{target_port}}/\"");
    desk.edge = start_edge_to(&desk.site, &gateway);
    (desk, proxy, format!("authorization: Bearer {key}"))
}

/// A chat whose answer has tokens for minutes.
fn endless(prompt: &str) -> String {
    chat("large", prompt, true).replace("\"max_tokens\":5", "\"max_tokens\":100000")
}

#[test]
fn requests_pass_a_reverse_proxy_with_their_class_deadline_key_tokens_and_cancellation() {
    lab::ring!(Netns);
    let (desk, proxy, key) = behind_proxy();
    let path = "/v1/chat/completions";
    for is_stream in [false, true] {
        let body = chat("large", "a b c", is_stream);
        let asked = ["--json", &body, "-H", &key, "-H", "x-paced-class: interactive", "-H", "x-slo-ttft-ms: 60000"];
        let (status, head, body) = desk.ask(path, &asked);
        assert_eq!(status, 200, "{body}; the proxy said:\n{}", proxy.output());
        assert!(head.contains("\r\nserver: caddy") && head.contains("\r\nx-paced-model: large"), "{head}");
        if is_stream {
            assert!(tokens(&body).1, "{body}");
        }
    }
    let counts = desk.settled();
    assert_eq!(counts.sum("gateway_deadlines_total"), 2, "{counts:?}");
    let of_ann = |labels: &Vec<(String, String)>| {
        [("user", "ann"), ("class", "interactive")]
            .iter()
            .all(|(name, value)| labels.iter().any(|of| of.0 == *name && of.1 == *value))
    };
    assert!(counts.labels("gateway_tokens_total").iter().any(of_ann), "{counts:?}");
    let (status, _, body) = desk.ask(path, &["--json", &chat("large", "a", false)]);
    assert_eq!(status, 401, "a request without a key: {body}");

    // A client that goes away ends its request at the engine, through two servers.
    let mut curl = desk.begin(&["--json", &endless("wait"), "-H", &key]);
    desk.wait_for_engine("wait");
    curl.kill().unwrap();
    curl.wait().unwrap();
    desk.settled();
}

#[test]
fn tokens_pass_a_reverse_proxy_as_they_are_made() {
    lab::ring!(Netns);
    let (desk, _proxy, key) = behind_proxy();
    let mut curl = desk.begin(&["--json", &endless("a"), "-H", &key]);
    let mut lines = BufReader::new(curl.stdout.take().unwrap()).lines();
    // The first ones are here before the last.
    let first = lines.by_ref().map_while(Result::ok).filter(|line| line.starts_with("data: ")).take(20).count();
    assert_eq!((first, desk.counts().of("gateway_in_flight")), (20, 1));
    curl.kill().unwrap();
    curl.wait().unwrap();
}
