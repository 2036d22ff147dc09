//! Listeners that end, or that a reload changes, while they answer.

use super::*;

/// An edge with an access log, and an engine.
fn desk() -> Desk {
    let mut desk = Desk::new(1, "", "");
    with_sections(&mut desk, SECTIONS);
    desk
}

const SECTIONS: &str = "[log]\naccess = \"json\"\n";

/// Begins an answer that goes on until [`assert_whole`] lets it end.
fn begin(desk: &Desk) -> KilledOnDrop {
    desk.large[0].slow_down(1_000);
    let asked = desk.large[0].counts()[0];
    let slow = json!({ "model": "large", "prompt": "x", "max_tokens": 30, "stream": true }).to_string();
    let child = desk.begin_chat(&slow);
    wait_for("the engine to be asked", SOON, || (desk.large[0].counts()[0] > asked).then_some(())).unwrap();
    child
}

fn assert_whole(desk: &Desk, answer: KilledOnDrop) {
    desk.large[0].slow_down(1);
    let output = answer.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.ends_with("data: [DONE]\n\n"), "{:?}: {said}", output.status);
}

/// Connects to the edge and sends the beginning of a head.
fn half_sent(desk: &Desk) -> std::io::Result<TcpStream> {
    let connect = || TcpStream::connect("127.0.0.1:8100");
    let mut stream = desk.site.chain.client.run(connect).unwrap()?;
    stream.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")?;
    Ok(stream)
}

/// Rewrites a file of the site.
fn edit(desk: &Desk, file: &str, edit: impl FnOnce(String) -> String) {
    let text = edit(std::fs::read_to_string(desk.site.path(file)).unwrap());
    desk.site.write(file, &text).unwrap();
}

fn reasons(edge: &Process) -> Vec<String> {
    edge.records("model").iter().map(|record| record["reason"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn an_edge_that_ends_lets_its_answers_end_and_accepts_no_client() {
    lab::ring!(Netns);
    let mut desk = desk();
    let answer = begin(&desk);
    let _silent = half_sent(&desk).unwrap();
    desk.edge.signal(libc::SIGTERM).unwrap();
    wait_for("the edge to accept no more", SOON, || half_sent(&desk).err()).unwrap();
    assert!(!desk.edge.has_ended().unwrap());
    assert_whole(&desk, answer);
    // A client with half a head does not hold the edge up.
    assert!(desk.edge.wait(Duration::from_secs(10)).unwrap().success());
    assert_eq!(reasons(&desk.edge), ["answered"]);

    desk.edge = lab::models::start_edge(&desk.site, SECTIONS).unwrap();
    let mut cut = begin(&desk);
    desk.edge.signal(libc::SIGTERM).unwrap();
    wait_for("the edge to accept no more", SOON, || half_sent(&desk).err()).unwrap();
    desk.edge.signal(libc::SIGTERM).unwrap();
    desk.edge.wait(SOON).unwrap();
    cut.wait().unwrap();
    assert_eq!(reasons(&desk.edge), ["unserved"], "the second signal cuts answers, which is not the client's doing");
}

#[test]
fn a_reload_that_changes_or_removes_the_address_of_an_edge_lets_its_answers_end() {
    lab::ring!(Netns);
    let desk = desk();
    let reload = |count: usize| {
        lab::process::send_signal(desk.edge.id(), libc::SIGHUP).unwrap();
        let is_done = || (desk.edge.output().matches("configuration reloaded").count() == count).then_some(());
        wait_for("the edge to reload", SOON, is_done).unwrap();
    };
    let first = begin(&desk);
    edit(&desk, "edge.toml", |text| {
        text.replace("listen = \"127.0.0.1:8100\"", "listen = \"127.0.0.1:8100\"\nidle_seconds = 61")
    });
    reload(1);
    let second = begin(&desk);
    let other = "listen = \"127.0.0.1:8101\"";
    edit(&desk, "edge.toml", |text| text.replace("listen = \"127.0.0.1:8100\"", other));
    reload(2);
    wait_for("the socket to close", SOON, || half_sent(&desk).err()).unwrap();
    [first, second].into_iter().for_each(|answer| assert_whole(&desk, answer));
    wait_for("two records", SOON, || (reasons(&desk.edge) == ["answered", "answered"]).then_some(())).unwrap();
}

#[test]
fn programs_that_send_half_a_head_keep_no_client_of_an_edge_out_and_bytes_of_requests_count() {
    lab::ring!(Netns);
    let desk = desk();
    edit(&desk, "edge.toml", |text| {
        text.replace("listen = \"127.0.0.1:8100\"", "listen = \"127.0.0.1:8100\"\nmax_connections = 8")
    });
    lab::process::send_signal(desk.edge.id(), libc::SIGHUP).unwrap();
    desk.edge.wait_for_line("configuration reloaded", SOON).unwrap();
    let _half: Vec<_> = (0..20).map(|_| half_sent(&desk).unwrap()).collect();
    let (status, _, body) = desk.chat("large", "x", false);
    assert_eq!(status, 200, "{body}");
    let of = |name: &str| {
        let counts = Counts::read(&desk.site.chain.client, METRICS).unwrap();
        counts.of(&format!(
            "{name}{{listen=\"127.0.0.1:8100\",protocol=\"serve\"{}}}",
            match name {
                "edge_limit_hits_total" => ",limit=\"clients_without_request\"",
                _ => "",
            }
        ))
    };
    assert!(of("edge_limit_hits_total") >= 16, "half of the eight places are for them");
    assert_eq!(of("edge_bytes_up_total"), chat("large", "x", false).len() as i64);
    assert_eq!(of("edge_bytes_down_total"), body.len() as i64);
}
