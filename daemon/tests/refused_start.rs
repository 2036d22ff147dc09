//! Tests of starts of `paced` that are refused.

use std::{
    fs,
    net::{TcpListener, UdpSocket},
    process::Command,
};

#[test]
fn a_start_that_is_refused_leaves_the_state_of_an_earlier_month_as_it_is() {
    let folder = std::env::temp_dir().join(format!("paced-refused-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path = |name: &str| folder.join(name);
    let identity = rcgen::generate_simple_self_signed(["relay.example".to_owned()]).unwrap();
    fs::write(path("paced.pem"), identity.cert.pem()).unwrap();
    fs::write(path("paced.key"), identity.signing_key.serialize_pem()).unwrap();
    // The metrics come last of what a start opens.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let free = UdpSocket::bind("127.0.0.1:0").unwrap();
    let text = format!(
        "state_dir = \"$\"\ncontrol.socket = \"$/control.sock\"\nmetrics.listen = \"{}\"\n\
         [relay]\nlisten = [\"{}\"]\ntemplates = [\"https://relay.example/{{target_host}}/{{target_port}}/\"]\n\
         auth = \"none\"\ncertificate = \"$/paced.pem\"\nprivate_key = \"$/paced.key\"\n",
        taken.local_addr().unwrap(),
        free.local_addr().unwrap()
    );
    drop(free);
    fs::write(path("paced.toml"), text.replace('$', &folder.display().to_string())).unwrap();
    let state = [
        ("quotas.json", r#"{"month":"2025-01","bytes":{"alice":499000000000}}"#),
        ("tokens.json", r#"{"month":"2025-01","tokens":{"alice":7}}"#),
    ];
    for (name, text) in state {
        fs::write(path(name), text).unwrap();
    }
    let program = env!("CARGO_BIN_EXE_paced");
    let output = Command::new(program).args(["run", "--config"]).arg(path("paced.toml")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(&taken.local_addr().unwrap().to_string()), "{said}");
    assert!(said.contains("2025-01") && said.contains("the clock has gone to another month"), "{said}");
    for (name, text) in state {
        assert_eq!(fs::read_to_string(path(name)).unwrap(), text, "{name}: {said}");
    }
    fs::remove_dir_all(folder).unwrap();
}
