use super::*;

#[tokio::test]
async fn a_page_of_another_site_may_not_use_an_edge_and_a_client_with_a_key_of_it_may() {
    let text = format!(
        "[[serve]]\nlisten = \"127.0.0.1:80\"\nhosts = [\"chat.example\"]\ntoken_file = \"/t\"\n\
         relay = \"https://r.example/{{target_host}}/{{target_port}}/\"\n[[serve.key]]\nname = \"ann\"\nsha256 = \"{}\"\n",
        hex(&Sha256::digest("sk-1"))
    );
    let config = Config::from_toml(&text).unwrap();
    let serve = &config.serves[0];
    let pages = PageRules::new(&serve.hosts, serve.listen, false);
    let limits = ClientLimits { pages, ..limits(4, Arc::default()) };
    let entrance = ModelEntrance::new(Nowhere::Refused, RequestClasses::at(serve), limits, Arc::default());
    let page = "host: 127.0.0.1:80\r\norigin: http://evil.example\r\nsec-fetch-site: cross-site\r\n";
    let rebound = "host: evil.example\r\norigin: http://evil.example\r\n";
    for (fields, key, status, code) in [
        (page, "", 403, "foreign_page"),
        (rebound, "", 403, "unknown_host"),
        (rebound, "authorization: Bearer sk-2\r\n", 403, "unknown_host"),
        (rebound, "authorization: Bearer sk-1\r\n", 503, "no_gateway"),
        ("host: chat.example\r\norigin: https://chat.example\r\n", "", 503, "no_gateway"),
        ("host: 127.0.0.1:80\r\n", "", 503, "no_gateway"),
    ] {
        let head = format!("POST /v1/completions HTTP/1.1\r\n{fields}{key}connection: close\r\n");
        // The client has sent all of a body that is refused before it was read.
        let body = " ".repeat(1_000);
        let (mut client, _) = begin(&entrance, &format!("{head}content-length: 1000\r\n\r\n{body}")).await;
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(code), "{fields}{key}{answer}");
    }
}
