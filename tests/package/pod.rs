//! The image's entry point as the DaemonSet runs it: the manifest's arguments, user, capability and volumes, its probes, and its
//! end, which is the preStop hook's drain and then SIGTERM.

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::Stdio,
    time::Duration,
};

use culvert_tests::{
    agent::{SHUTDOWN_LIMIT, keygen},
    clock::{self, PATIENCE},
    place::Place,
    process::{Running, run, text},
};

use crate::{
    container::{GIVEN, Image, Mount},
    repository,
};

/// Where the pod's volumes are on the machine.
const VOLUMES: &str = "/pod";

/// A manifest, as this test reads it: what stands on one line.
struct Manifest(String);

impl Manifest {
    fn read(name: &str) -> Self {
        Self(fs::read_to_string(repository(&format!("deploy/kubernetes/base/{name}"))).unwrap())
    }

    /// The values of all `key: value`, in order.
    fn values<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        let lines = self.0.lines().map(|line| line.trim_start().trim_start_matches("- "));
        lines.filter_map(move |line| line.strip_prefix(key)?.strip_prefix(": "))
    }

    /// The only value of `key`.
    #[track_caller]
    fn value<'a>(&'a self, key: &'a str) -> &'a str {
        let mut values = self.values(key);
        let (Some(value), None) = (values.next(), values.next()) else { panic!("one {key}, please") };
        value
    }

    #[track_caller]
    fn words(&self, key: &str) -> Vec<String> {
        serde_json::from_str(self.value(key)).unwrap()
    }

    /// The text under `key: |`.
    fn block(&self, key: &str) -> String {
        let mut lines = self.0.lines().skip_while(|line| line.trim() != format!("{key}: |"));
        let indent = lines.next().unwrap().find(|character| character != ' ').unwrap();
        let inside =
            |line: &&str| line.trim().is_empty() || line.find(|character| character != ' ') > Some(indent);
        lines.take_while(inside).map(|line| format!("{}\n", line.trim_start())).collect()
    }
}

/// Makes the volumes as the kubelet does: a ConfigMap and Secrets as links to a folder that is swapped whole, with the group of
/// `fsGroup`, and empty folders that this group may write.
fn volumes(image: &Image, daemon_set: &Manifest) -> Vec<Mount> {
    let group = daemon_set.value("fsGroup");
    let mode = daemon_set.value("defaultMode");
    let place = image.machine.path(VOLUMES);
    for (volume, file) in
        [("config", Some("agent.toml")), ("identity", Some("identity.key")), ("peers", None)]
    {
        let folder = place.join(volume);
        fs::create_dir_all(folder.join("..data-1")).unwrap();
        std::os::unix::fs::symlink("..data-1", folder.join("..data")).unwrap();
        if let Some(file) = file {
            std::os::unix::fs::symlink(format!("..data/{file}"), folder.join(file)).unwrap();
        }
    }
    fs::write(place.join("config/..data-1/agent.toml"), Manifest::read("config.yaml").block("agent.toml"))
        .unwrap();
    keygen(&place.join("identity/..data-1/identity.key"));
    for folder in ["state", "run"] {
        fs::create_dir(place.join(folder)).unwrap();
    }
    let script = "cd \"$1\"; chown -R root:\"$2\" .; chmod \"$3\" identity/..data-1/identity.key; chmod 2777 state run";
    image.machine.tell(&["sh", "-ec", script, "sh", VOLUMES, group, mode]);
    let paths: Vec<&str> = daemon_set.values("mountPath").filter(|path| *path != "/dev/net/tun").collect();
    let volumes = ["config", "identity", "peers", "state", "run"];
    assert_eq!(paths.len(), volumes.len(), "{paths:?}");
    let mounts = volumes.into_iter().zip(paths).map(|(volume, path)| {
        // The container's runtime makes the folders that the image has not.
        image.machine.tell(&["mkdir", "--parents", path]);
        let read_only = !["state", "run"].contains(&volume);
        Mount { from: format!("{VOLUMES}/{volume}"), to: path.to_owned(), read_only }
    });
    mounts.collect()
}

/// The HTTP status of a probe, or why there is none.
fn probe(place: &Place, path: &str) -> Result<u16, String> {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, 9464)))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = place.enter(ask).map_err(|error| error.to_string())?;
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or(answer)
}

#[test]
fn the_image_runs_as_the_pod_of_the_manifest_and_ends_as_its_hook_says() {
    let Some(image) = Image::new("the pod's container") else { return };
    let daemon_set = Manifest::read("daemonset.yaml");
    let user = format!("{}:{}", daemon_set.value("runAsUser"), daemon_set.value("runAsGroup"));
    assert_eq!(image.last.only("USER"), user, "the files of the image are that user's");
    assert_eq!(daemon_set.value("readOnlyRootFilesystem"), "true");
    assert_eq!([daemon_set.value("drop"), daemon_set.value("add")], ["[\"ALL\"]", "[\"NET_ADMIN\"]"]);
    let mounts = volumes(&image, &daemon_set);
    let arguments = daemon_set.words("args");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let said = || fs::read_to_string(&log).unwrap();
    let mut command = image.command_with(GIVEN, &mounts, &image.entry(&arguments));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap());
    let mut agent = Running::start("the pod's agent", &mut command);
    let place = &image.cable.places()[0];
    let paths: Vec<&str> = daemon_set.values("path").filter(|path| path.ends_with('z')).collect();
    assert_eq!(paths, ["/readyz", "/healthz", "/readyz"], "readiness, liveness, startup");
    for path in paths {
        clock::until(&format!("{path} says 200"), PATIENCE, || {
            assert!(agent.ended().is_none(), "{}", said());
            match probe(place, path) {
                Ok(200) => Ok(()),
                other => Err(format!("{other:?}\n{}", said())),
            }
        });
    }
    let hook = daemon_set.words("command");
    let output = run(&mut image.command_with(GIVEN, &mounts, &hook), Duration::from_secs(60));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(probe(place, "/readyz"), Ok(503), "no new peers");
    assert_eq!(probe(place, "/healthz"), Ok(200), "and no reason to kill it");
    let pid = image.machine.processes("culvert");
    image.machine.tell(&["sh", "-c", "kill -TERM \"$1\"", "sh", &pid.concat()]);
    assert!(agent.wait(SHUTDOWN_LIMIT).success(), "{}", said());
}
