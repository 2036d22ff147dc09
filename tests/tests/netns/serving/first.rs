//! The first steps of the operator's page: its configuration and its commands, as they stand there.

use super::*;

/// The page.
const PAGE: &str = include_str!("../../../../docs/models.md");

/// The first block of code in a language below a heading.
fn block<'a>(heading: &str, language: &str) -> Option<&'a str> {
    let (_, section) = PAGE.split_once(&format!("\n## {heading}\n"))?;
    let (section, _) = section.split_once("\n## ")?;
    let (_, code) = section.split_once(&format!("```{language}\n"))?;
    Some(code.split_once("```")?.0)
}

#[test]
fn less_than_ten_lines_lead_from_nothing_to_a_served_request() {
    lab::ring!(Netns);
    let heading = "From nothing to a served request";
    let (config, commands) = (block(heading, "toml").unwrap(), block(heading, "sh").unwrap());
    assert!(config.lines().count() + commands.lines().count() < 10, "{config}{commands}");
    let (run, ask) = commands.trim_end().split_once('\n').unwrap();

    let host = lab::netns::Namespace::new("host").unwrap();
    let engine = Engine::start(&host, 8001, "large", Speed::default()).unwrap();
    let files = lab::site::Folder::new(host.name()).unwrap();
    let folder = files.path();
    std::fs::create_dir_all(folder.join("conf.d")).unwrap();
    files.write("gateway.toml", config).unwrap();
    // This machine's own folders stay as they are.
    let own = format!("state_dir = \"{0}/state\"\n[control]\nsocket = \"{0}/socket\"\n", folder.display());
    files.write("conf.d/test.toml", &own).unwrap();
    let programs = lab::program("paced").unwrap().parent().unwrap().display().to_string();
    let command = |line: &str| format!("cd {} && PATH={programs}:$PATH exec {line}", folder.display());
    let mut paced = host.start("sh", ["-c", &command(run)]).unwrap();
    paced.wait_for_line("serving models", SOON).unwrap();

    let asked = host.command("sh").unwrap().args(["-c", &command(ask)]).output().unwrap();
    let said = [asked.stdout, asked.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    assert!(asked.status.success() && said.contains("large (named): 16 tokens in "), "{said} {}", paced.output());
    assert!(engine.last().unwrap().body.contains("hello"));

    // You can inspect and change the daemon like any other. It finishes open requests before it ends.
    let socket = format!("--socket {}/socket", folder.display());
    let pacectl = |what: &str| {
        let output = host.command("sh").unwrap().args(["-c", &command(&format!("pacectl {socket} {what}"))]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    assert!(pacectl("status").contains("serves models 127.0.0.1:8100"));
    assert!(pacectl("engines").contains("large"));
    let renamed = config.replace("\"large\"", "\"renamed\"");
    files.write("gateway.toml", &renamed).unwrap();
    assert!(pacectl("reload").contains("revision"));
    assert!(pacectl("engines").contains("renamed"));
    let ask = || {
        let asked = host.command("sh").unwrap().args(["-c", &command("pacectl ask --model renamed 'x y z'")]).output();
        assert!(asked.unwrap().status.success());
    };
    // So many answers of a class are needed to know their lengths.
    (0..32).for_each(|_| ask());
    let end = |paced: &mut lab::process::Process| {
        paced.signal(libc::SIGTERM).unwrap();
        assert!(paced.wait(SOON).unwrap().success(), "{}", paced.output());
        std::fs::read_to_string(folder.join("state/engines.json")).unwrap()
    };
    let learned = end(&mut paced);
    assert!(learned.contains("\"class\":\"default\",\"tokens\":16.0"), "{learned}");

    let mut paced = host.start("sh", ["-c", &command(run)]).unwrap();
    paced.wait_for_line("serving models", SOON).unwrap();
    ask();
    let after = end(&mut paced);
    assert_ne!(after, learned, "it has learned more");
    assert!(after.contains("\"class\":\"default\",\"tokens\":16.0"), "one answer is not enough, so it knew: {after}");
}
