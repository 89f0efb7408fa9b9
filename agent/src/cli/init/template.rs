//! The configuration as text: what matters, with comments, in the order of `config/agent.example.toml`.

use std::fmt::Display;

use super::{
    options::{KEY_FILE, Pair, Role},
    plan::Plan,
};

/// What an entry calls the exit that it dials.
pub(super) const EXIT: &str = "exit";

/// `transport.mark` where routes need one: any number that nothing else on the host uses.
const MARK: u32 = 4433;

/// Returns the text of the configuration file that `plan` describes.
pub(super) fn render(plan: &Plan) -> String {
    let sections = [
        head(plan.role),
        identity(plan),
        transport(plan),
        plan.services.iter().map(service).collect(),
        no_service(plan),
        peer(plan),
        plan.udp.iter().map(|pair| forward("udp", pair)).collect(),
        plan.tcp.iter().map(|pair| forward("tcp", pair)).collect(),
        tun(plan),
        METRICS.to_owned(),
        if plan.apart { CONTROL.to_owned() } else { String::new() },
        LOG.to_owned(),
    ];
    let sections: Vec<&str> = sections.iter().map(String::as_str).filter(|text| !text.is_empty()).collect();
    sections.join("\n")
}

/// A text as TOML writes it, whatever is in it.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

fn list<'a>(texts: impl IntoIterator<Item = &'a String>) -> String {
    let texts: Vec<String> = texts.into_iter().map(|text| quoted(text)).collect();
    format!("[{}]", texts.join(", "))
}

fn line(key: &str, value: impl Display) -> String {
    format!("{key} = {value}\n")
}

fn head(role: Role) -> String {
    let what = match role {
        Role::Entry => "An entry: it dials an exit.",
        Role::Exit => "An exit: it listens for entries, which are peers.",
    };
    format!(
        "# {what} Written by culvert init; yours to change.\n\
         # A line that is commented out shows a default, or what could stand there. All keys: man culvert.toml.\n\
         # After a change: culvert check --config FILE, then culvert reload.\n"
    )
}

fn identity(plan: &Plan) -> String {
    let mut text = "[identity]\n\
        # Our private key. Relative paths start at the folder of this file.\n"
        .to_owned();
    text += &line("key_file", quoted(KEY_FILE));
    text +=
        "# What must survive a restart: the peers that culvert peer adds, and the proofs that were used.\n";
    text += if plan.apart { "state_dir = \"state\"\n" } else { "# state_dir = \"/var/lib/culvert\"\n" };
    text
}

fn transport(plan: &Plan) -> String {
    let mut text = "[transport]\n".to_owned();
    match plan.role {
        Role::Exit => {
            text += "# UDP. Open the port in the firewall.\n";
            text += &line("listen", list(&plan.listen));
            text += "# What culvert link prints: where entries find this host, by name or address.\n";
            text += &plan.advertise.as_ref().map_or_else(String::new, |text| line("advertise", quoted(text)));
            if let Some(id) = plan.server_id {
                text += "# Names this exit among those with this key behind one address; another number at each.\n";
                text += &line("server_id", id);
            }
        }
        Role::Entry => {
            text += "# Without a listen address this agent only dials.\n# listen = [\"0.0.0.0:4433\"]\n";
        }
    }
    text += "# Threads that move packets; 0 is one per CPU.\n# workers = 0\n";
    if plan.mark {
        text += "# The tunnel's own packets carry this mark, so that they do not take the default route into the tunnel.\n";
        text += &line("mark", MARK);
    }
    text
}

fn service(pair: &Pair) -> String {
    let only = ["udp", "tcp"].into_iter().find_map(|protocol| {
        let address = pair.right.strip_suffix(protocol)?.strip_suffix('/')?;
        Some((address, protocol))
    });
    let (address, protocol) = match only {
        Some((address, protocol)) => (address, line("protocol", quoted(protocol))),
        None => (&*pair.right, "# UDP and TCP; or one of them:\n# protocol = \"udp\"\n".to_owned()),
    };
    "# A service that peers may use whose `services` name it.\n[[service]]\n".to_owned()
        + &line("name", quoted(&pair.left))
        + &line("upstream", quoted(address))
        + &protocol
}

/// What a service looks like, at an exit that has none.
fn no_service(plan: &Plan) -> String {
    match plan.role {
        Role::Exit if plan.services.is_empty() => {
            "# A UDP and TCP service that peers may use whose `services` name it:\n\
             # [[service]]\n# name = \"dns\"\n# upstream = \"127.0.0.1:53\"\n"
                .to_owned()
        }
        Role::Exit | Role::Entry => String::new(),
    }
}

fn peer(plan: &Plan) -> String {
    let Some(link) = &plan.peer else {
        return "# Entries are added with culvert peer add, which the daemon keeps in its state folder, or here:\n\
                # [[peer]]\n# name = \"branch\"\n# public_key = \"\"               # what culvert init printed there\n\
                # allowed_ips = [\"10.9.0.2/32\"]  # its own addresses in the tunnel\n\
                # services = [\"dns\"]\n"
            .to_owned();
    };
    let mut text = "# The exit.\n[[peer]]\n".to_owned();
    text += &line("name", quoted(EXIT));
    text += &line("public_key", quoted(&link.key.to_string()));
    text += &line("endpoints", list([&link.endpoint.to_string()]));
    if let Some(file) = &plan.preshared_key_file {
        text += &line("preshared_key_file", quoted(file));
    }
    if !plan.allowed_ips.is_empty() {
        text += "# What is behind it: packets for these addresses go there, and its packets come from no others.\n";
        text += &line("allowed_ips", list(&plan.allowed_ips));
    }
    text +=
        "# \"latency\" acknowledges sooner, for a third more CPU per packet.\n# profile = \"throughput\"\n";
    text
}

fn forward(protocol: &str, pair: &Pair) -> String {
    let what = if protocol == "udp" { "UDP" } else { "TCP" };
    format!("# A local {what} port that stands for a service of the exit.\n[[{protocol}]]\n")
        + &line("listen", quoted(&pair.left))
        + &line("peer", quoted(EXIT))
        + &line("service", quoted(&pair.right))
}

fn tun(plan: &Plan) -> String {
    if plan.tun.is_empty() {
        return String::new();
    }
    "# A network interface whose IP packets go to the peers.\n[tun]\n".to_owned()
        + "# Our own addresses in the tunnel, each with the prefix of its link.\n"
        + &line("address", list(&plan.tun))
        + &behind(plan)
        + "# name = \"culvert0\"\n"
}

/// A word on the networks behind this host, which are keys of the other end.
fn behind(plan: &Plan) -> String {
    if plan.networks.is_empty() {
        return String::new();
    }
    let networks: Vec<String> = plan.networks.iter().map(ToString::to_string).collect();
    format!(
        "# Behind this host: {}. The other end has them in the allowed_ips of this peer.\n",
        networks.join(", ")
    )
}

const METRICS: &str = "# Metrics for Prometheus, and /healthz and /readyz, over HTTP without authentication:\n\
     # [metrics]\n# listen = \"127.0.0.1:9464\"\n";

const CONTROL: &str = "[control]\n\
     # Where culvert peer, status and reload reach the daemon.\nsocket = \"culvert.sock\"\n";

const LOG: &str = "[log]\n# \"error\", \"warn\", \"info\", \"debug\" or \"trace\"\nlevel = \"info\"\n\
     # \"json\" for machines\n# format = \"text\"\n";
