//! Checks that the documents are true of this repository: the files and headings that links point to, the programs that
//! commands name, and the tests that code spans name.

#![expect(clippy::unwrap_used, reason = "helpers fail a test in the same way as the test itself")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The project's folder.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// All documents, by their paths from the project's folder.
fn documents() -> Vec<PathBuf> {
    let markdown = |folder: &str| {
        let entries = fs::read_dir(project().join(folder)).unwrap().map(|entry| entry.unwrap().file_name());
        entries.map(|name| Path::new(folder).join(name)).collect::<Vec<_>>()
    };
    let all = ["", "docs", "perf", "perf/peers", "tests/interop"].into_iter().flat_map(markdown);
    all.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

fn text(document: &Path) -> String {
    fs::read_to_string(project().join(document)).unwrap()
}

/// The lines of a document outside its code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// The targets of the links in a line.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(to, _)| to)
}

/// The anchors of a document's headings: lower case, a hyphen for each space, and no other punctuation.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = |character: char| match character {
            ' ' => Some('-'),
            '-' | '_' => Some(character),
            _ => character.is_alphanumeric().then(|| character.to_ascii_lowercase()),
        };
        heading.trim_start_matches('#').trim().chars().filter_map(kept).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn every_link_of_a_document_leads_somewhere() {
    let (mut dead, mut seen) = (Vec::new(), 0);
    for document in documents() {
        let text = text(&document);
        for to in prose(&text).flat_map(links).filter(|to| !to.contains("://")) {
            seen += 1;
            let (file, anchor) = to.split_once('#').unwrap_or((to, ""));
            let file = if file.is_empty() { document.clone() } else { document.parent().unwrap().join(file) };
            let is_there =
                project().join(&file).exists() && (anchor.is_empty() || anchors(&self::text(&file)).contains(anchor));
            if !is_there {
                dead.push(format!("{}: {to}", document.display()));
            }
        }
    }
    assert!(dead.is_empty(), "dead links: {dead:#?}");
    assert!(seen > 100, "only {seen} links were found");
}

/// A page as the package has it (`docs/packaged.sed`).
fn packaged(page: &Path) -> String {
    let sed = Command::new("sed").args(["-Ez", "-f", "docs/packaged.sed"]).arg(page).current_dir(project()).output();
    let sed = sed.unwrap();
    assert!(sed.status.success(), "{}", String::from_utf8_lossy(&sed.stderr));
    String::from_utf8(sed.stdout).unwrap()
}

/// The files that `make install` installs, and with it the package, below the prefix /usr. Names may have wildcards.
fn installed(makefile: &str) -> BTreeSet<String> {
    let joined = makefile.replace("\\\n", " ");
    let mut files = BTreeSet::new();
    for command in joined.split("install -D ").skip(1).filter_map(|rest| rest.split(['\n', '&', ';']).next()) {
        let mut words = command.split_whitespace();
        let (mut folder, mut names) = (None, Vec::new());
        while let Some(word) = words.next() {
            match word {
                "-t" => folder = words.next(),
                "-m" => _ = words.next(),
                name => names.push(name),
            }
        }
        let below = |path: &str| path.replace("$(DESTDIR)", "").replace("$(PREFIX)", "/usr");
        match folder {
            Some(folder) => files.extend(names.iter().map(|name| {
                let name = name.rsplit('/').next().unwrap();
                format!("{}/{name}", below(folder))
            })),
            None => files.extend(names.last().map(|name| below(name))),
        }
    }
    files
}

#[test]
fn links_of_a_packaged_page_lead_to_files_that_the_package_installs() {
    let makefile = fs::read_to_string(project().join("Makefile")).unwrap();
    let files = installed(&makefile);
    let installs = |file: &str| files.contains(file);
    assert!(installs("/usr/share/doc/paced/README.md") && !installs("/usr/share/doc/paced/ARCHITECTURE.md"));
    assert!(installs("/usr/share/doc/paced/docs/*.md") && installs("/etc/paced/paced.toml"), "{files:?}");
    let pages: Vec<_> =
        documents().into_iter().filter(|page| page == Path::new("README.md") || page.starts_with("docs")).collect();
    let (mut dead, mut seen) = (Vec::new(), 0);
    for page in &pages {
        let text = packaged(page);
        for to in prose(&text).flat_map(links).filter(|to| !to.contains("://")) {
            seen += 1;
            let (file, _) = to.split_once('#').unwrap_or((to, ""));
            let is_page = file.is_empty()
                || pages.iter().any(|other| {
                    let relative = page.parent().unwrap().join(file);
                    *other
                        == relative.components().fold(PathBuf::new(), |mut path, part| {
                            if part.as_os_str() == ".." {
                                _ = path.pop()
                            } else {
                                path.push(part)
                            }
                            path
                        })
                });
            if !is_page && !installs(file) {
                dead.push(format!("{}: {to}", page.display()));
            }
        }
    }
    assert!(dead.is_empty(), "dead links in the package: {dead:#?}");
    assert!(seen > 30, "only {seen} links were found");
}

/// The folder of each profile that the Makefile builds, below `target`.
fn folders(makefile: &str) -> BTreeSet<&str> {
    let named = makefile.split("--profile ").skip(1).filter_map(|rest| rest.split_whitespace().next());
    let release = makefile.contains("cargo build --release").then_some("release");
    named.filter(|name| !name.contains('$')).chain(release).collect()
}

#[test]
fn programs_lie_where_the_documents_say() {
    let makefile = fs::read_to_string(project().join("Makefile")).unwrap();
    let run = makefile.split("\nrun:").nth(1).unwrap().split("\n\n").next().unwrap();
    let (all, quick_start) = (folders(&makefile), folders(run));
    let mut seen = 0;
    for document in documents() {
        let text = text(&document);
        for path in text.split("target/").skip(1).filter_map(|rest| rest.split_whitespace().next()) {
            let Some((folder, program)) = path.split_once('/').filter(|(_, program)| {
                ["paced", "pacectl", "paced.deb"].contains(&program.trim_matches(['`', ',', '.', ')']))
            }) else {
                continue;
            };
            seen += 1;
            let expected = if document == Path::new("README.md") { &quick_start } else { &all };
            let document = document.display();
            assert!(expected.contains(folder), "{document} names {program} in {folder}, where it is not built");
        }
    }
    assert!(seen > 3, "only {seen} programs were found");
}

/// Adds the names of the tests in all source files below a folder.
fn add_tests(folder: &Path, tests: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            if name != "target" && !name.starts_with('.') {
                add_tests(&entry.path(), tests);
            }
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(entry.path()).unwrap();
            let marked = ["#[test]", "#[tokio::test]"].into_iter().flat_map(|mark| text.split(mark).skip(1));
            let name = |rest: &str| Some(rest.split_once("fn ")?.1.split_once('(')?.0.to_owned());
            tests.extend(marked.filter_map(name));
        }
    }
}

#[test]
fn tests_that_a_document_names_exist() {
    let (mut tests, mut missing, mut seen) = (BTreeSet::new(), Vec::new(), 0);
    add_tests(&project(), &mut tests);
    // The operator's manual names metrics, which look the same, and no tests.
    for document in documents().into_iter().filter(|document| !document.starts_with("docs")) {
        let text = text(&document);
        // A code span of many words in lower case; an ellipsis stands for the rest of a long name.
        let spans =
            prose(&text).flat_map(|line| line.split('`').skip(1).step_by(2)).map(|span| span.trim_end_matches('…'));
        let is_rule = |span: &&str| {
            span.matches('_').count() > 4
                && span.chars().all(|letter| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_')
        };
        for name in spans.filter(is_rule) {
            seen += 1;
            let is_there = match name.strip_suffix('_') {
                Some(_) => tests.range(name.to_owned()..).next().is_some_and(|test| test.starts_with(name)),
                None => tests.contains(name),
            };
            if !is_there {
                missing.push(format!("{}: {name}", document.display()));
            }
        }
    }
    assert!(missing.is_empty(), "there are no tests of these names: {missing:#?}");
    assert!(seen > 10, "only {seen} tests are named");
}
