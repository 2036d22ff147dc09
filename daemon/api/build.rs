//! Compiles the definition of the control plane's protocol.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const FILE: &str = "paced/v1/control.proto";
    println!("cargo:rerun-if-changed=proto");
    let set = protox::compile([FILE], ["proto"])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    // For reflection.
    std::fs::write(out.join("paced.bin"), protox::prost::Message::encode_to_vec(&set))?;
    let mut build = tonic_prost_build::configure();
    // For `pacectl --json`. Fields of foreign types are serialised as text for humans.
    build = build.message_attribute(".", "#[derive(serde::Serialize)]");
    let times = ["since", "started", "confirm_by", "expires", "time"];
    let spans = ["sojourn", "interval", "confirm_within", "duration", "smoothed_rtt", "min_rtt"];
    let costs =
        ["budget", "predicted", "ejected_for", "step", "step_per_request", "first_token", "first_token_per_thousand"];
    for field in times.into_iter().chain(spans).chain(costs) {
        build = build.field_attribute(field, "#[serde(serialize_with = \"super::shown\")]");
    }
    build.compile_fds(set)?;
    Ok(())
}
