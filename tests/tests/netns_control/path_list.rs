//! What `pacectl` shows of an edge's paths while they are used.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::Stdio,
    time::Duration,
};

use lab::{
    application::{application, assert_carries},
    engine::{Engine, Speed},
    flow::{Flow, OFTEN, watch},
    process::{KilledOnDrop, Process, wait_for},
    site::{SOON, Site},
    uplinks::{ROUND_ROBIN, Uplinks, wait_until_up},
};
use serde_json::Value;

use super::trace::record_alone;

/// Starts `pacectl` against the edge at the client.
fn pacectl(site: &Site, arguments: &[&str]) -> Process {
    let socket = ["--socket".to_owned(), site.path("edge.sock").display().to_string()];
    let arguments = socket.into_iter().chain(arguments.iter().map(ToString::to_string));
    site.chain.client.start(lab::program("pacectl").unwrap(), arguments).unwrap()
}

#[test]
fn paths_are_shown_each_second_with_what_is_on_them_until_the_reader_has_gone() {
    lab::ring!(Netns);
    let uplinks = Uplinks::to_models();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    let thinking = Speed { prefill: Duration::from_secs(60), ..Speed::default() };
    let engine = Engine::start(&site.chain.target, 8001, "large", thinking).unwrap();
    let edge = uplinks.edge(&uplinks.serve(ROUND_ROBIN));
    wait_until_up(site);
    let sockets: Vec<_> = (0..4).map(|_| application(site, "127.0.0.1:5000")).collect();
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));
    let mut asked: Vec<_> = (0..2)
        .map(|_| {
            let mut curl = site.chain.client.command("curl").unwrap();
            let body = r#"{"model":"large","messages":[{"role":"user","content":"x"}],"stream":true}"#;
            curl.args(["-sS", "-N", "http://127.0.0.1:8100/v1/chat/completions", "--json", body]);
            KilledOnDrop::start(curl.stdout(Stdio::null()).stderr(Stdio::null())).unwrap()
        })
        .collect();
    wait_for("the engine to think", SOON, || (engine.counts()[0] == 2).then_some(())).unwrap();

    let (shown, events) =
        (pacectl(site, &["paths", "--watch"]), pacectl(site, &["events", "--kind", "path", "--kind", "reload"]));
    let hears = || {
        _ = said(site, &["reload"]);
        events.output().contains("the configuration was read again").then_some(())
    };
    wait_for("a listener to be registered", SOON, hears).unwrap();
    let counts = |line: &str| {
        let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
        // Before the IDs of connections: tunnels, requests, and tunnels that moved.
        words.iter().rev().skip(1).take(3).rev().cloned().collect::<Vec<_>>().join(" ")
    };
    for path in ["first ", "second "] {
        let line = shown.wait_for_line(path, SOON).unwrap();
        assert!(line.contains(" up ") && counts(&line) == "3 1 0", "{line}; the edge said:\n{}", edge.output());
    }
    watch(&sockets, Duration::from_secs(3), || uplinks.cut(true)).unwrap();
    let is_seen = || {
        let said = shown.output();
        let mut of_first = said.lines().filter(|line| line.starts_with("first "));
        let moved = of_first.any(|line| line.contains(" up ") && counts(line).starts_with("6 2 "));
        let silent = said.lines().any(|line| line.starts_with("second ") && !line.contains(" up "));
        (moved && silent).then_some(())
    };
    wait_for("the path's end to be seen", SOON, is_seen).unwrap_or_else(|error| panic!("{error}: {}", shown.output()));
    events.wait_for_line("the path second to 10.0.1.2:443 does not answer", SOON).unwrap();
    drop(shown);
    asked.iter_mut().for_each(|curl| _ = curl.kill().and_then(|()| curl.wait()));

    for arguments in [&["paths", "--watch"][..], &["--json", "paths", "--watch"]] {
        let mut command = site.chain.client.command(lab::program("pacectl").unwrap()).unwrap();
        command.arg("--socket").arg(site.path("edge.sock")).args(arguments);
        let mut watch = KilledOnDrop::start(command.stdout(Stdio::piped()).stderr(Stdio::piped())).unwrap();
        let mut line = String::new();
        BufReader::new(watch.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("path ") || line.starts_with("{\"paths\":["), "{line}");
        let ended = wait_for("the end of the command", SOON, || watch.try_wait().transpose()).unwrap().unwrap();
        let mut said = String::new();
        watch.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(ended.success() && said.is_empty(), "{arguments:?}: {ended}: {said}");
    }
}

#[test]
fn lists_logs_and_traces_name_the_path_of_what_they_show() {
    lab::ring!(Netns);
    let uplinks = Uplinks::new();
    let site = &uplinks.site;
    let _echo = site.chain.target.echo(7).unwrap();
    let edge = uplinks.edge(ROUND_ROBIN);
    wait_until_up(site);
    let sockets: Vec<_> = (0..2).map(|_| application(site, "127.0.0.1:5000")).collect();
    sockets.iter().for_each(|socket| assert_carries(site, socket, 600));

    let connections = site.json_at("edge.sock", &["connections"]).unwrap();
    let path_of = |id: &Value| {
        let found = connections.as_array().unwrap().iter().find(|connection| connection["id"] == *id);
        found.unwrap_or_else(|| panic!("{id}: {connections}"))["path"].as_str().unwrap().to_owned()
    };
    let tunnels = site.json_at("edge.sock", &["tunnels"]).unwrap();
    let mut of_tunnels = Vec::new();
    for tunnel in tunnels.as_array().unwrap() {
        let path = tunnel["path"].as_str().unwrap();
        assert_eq!(path, path_of(&tunnel["connection"]), "{tunnels}");
        of_tunnels.push(path);
    }
    of_tunnels.sort_unstable();
    assert_eq!(of_tunnels, ["first", "second"], "{tunnels}; the edge said:\n{}", edge.output());

    for connection in connections.as_array().unwrap() {
        let (id, path) = (connection["id"].to_string(), connection["path"].as_str().unwrap());
        let logged = said(site, &["qlog", &id, "--seconds", "1", "--output", "-"]);
        let header: Value = serde_json::from_str(logged.lines().next().unwrap().trim_start_matches('\u{1e}')).unwrap();
        assert_eq!(header["trace"]["common_fields"]["paced_path"], path, "{header}");
        assert!(header["title"].as_str().unwrap().ends_with(&format!(" over {path}")), "{header}");
    }

    let _alone = record_alone();
    // Packets leave from before the recording until after it.
    let flow = Flow::start(&sockets, OFTEN).unwrap();
    let recorded = pacectl(site, &["--json", "trace", "--seconds", "2"]);
    let line = recorded.wait_for_line("{\"rows\":", SOON).unwrap();
    flow.end().unwrap();
    let trace: Value = serde_json::from_str(&line).unwrap();
    for (path, device) in [("first", "relay"), ("second", "router")] {
        let mut of_path = trace["rows"].as_array().unwrap().iter().filter(|row| row["path"] == path).peekable();
        assert!(of_path.peek().is_some(), "no packet of {path}: {line}");
        assert!(of_path.all(|row| row["device"] == device), "{path} leaves by {device}: {line}");
    }
}

/// Returns the output of a `pacectl` command. The command must not fail.
fn said(site: &Site, arguments: &[&str]) -> String {
    let mut command = pacectl(site, arguments);
    let ended = command.wait(SOON).unwrap();
    assert!(ended.success(), "{arguments:?}: {}", command.output());
    command.output()
}
