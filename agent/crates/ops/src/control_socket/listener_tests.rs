//! The socket: who may reach it, how many, and what is no daemon.

use super::*;

#[test]
fn the_socket_is_private_answers_and_goes_away() {
    let case = Case::new(false);
    let socket = ControlSocket::open(&case.socket(), case.handler()).unwrap();
    assert_eq!(fs::metadata(socket.path()).unwrap().permissions().mode() & 0o7777, 0o600);
    let Answer::Status { status } = ask(socket.path(), &Request::Status(Scope::default())).unwrap() else {
        panic!()
    };
    assert_eq!((status.software.as_str(), status.workers), ("1.2.3", 2));

    // One connection may ask more than once.
    let mut stream = UnixStream::connect(socket.path()).unwrap();
    let program = |line: &str| protocol::program(line.as_bytes());
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    for (request, expected) in [(add("b", KEY_2), idle()), (remove("b"), Answer::Done { note: None })] {
        stream.write_all(request.to_line().as_bytes()).unwrap();
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert_eq!(Answer::from_line(line.as_bytes()), Some(expected), "{line}");
        assert_eq!(program(&line).as_deref(), Some("1.2.3"), "{line}");
    }
    drop(socket);
    assert_eq!(entries(case.folder.path()), ["state"]);
    let gone = ask(&case.socket(), &Request::Status(Scope::default())).unwrap_err();
    assert!(matches!(gone, AskError::NotRunning(_)), "{gone}");
}

#[test]
fn the_file_of_the_socket_is_private_before_anybody_can_connect() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = super::super::listener::bound_private(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    let refused = UnixStream::connect(&path).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    drop(listener);
}

#[test]
fn no_answer_is_told_from_a_wrong_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let says = |answer: &'static [u8]| {
        std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
                stream.write_all(answer).unwrap();
            });
            let error = ask(&path, &Request::Status(Scope::default())).unwrap_err();
            server.join().unwrap();
            error
        })
    };
    let nothing = says(b"");
    assert!(
        matches!(nothing, AskError::Unanswered(_)) && nothing.to_string().contains("try again"),
        "{nothing}"
    );
    let misunderstood = |answer, theirs: Option<&str>| {
        let error = says(answer);
        let AskError::Misunderstood { programs, .. } = &error else { panic!("{error}") };
        assert_eq!(*programs, Programs { command: OURS, daemon: theirs.map(str::to_owned) });
        error.to_string()
    };
    let older = "this command is culvert 1.3.0 (ours), the daemon is an older one, which does not say its version (remedy: ";
    for answer in [&b"HTTP/1.1 400\r\n"[..], b"{\"answer\":\"status\",\"status\":{},\"version\":1}\n"] {
        let shown = misunderstood(answer, None);
        assert!(shown.contains(older), "{shown}");
    }
    let later = b"{\"answer\":\"telegram\",\"program\":\"1.4.0 (f00\x5cu001b, release)\",\"version\":2}\n";
    let shown = misunderstood(later, Some("1.4.0 (f00\u{1b}, release)"));
    assert!(shown.contains("the daemon is culvert 1.4.0 (f00") && !shown.contains('\u{1b}'), "{shown}");
    let slow = AskError::TimedOut(path).to_string();
    assert!(slow.contains("no answer within 5 s"), "{slow}");
}

fn entries(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    fs::read_dir(folder).unwrap().map(name).collect()
}

#[test]
fn a_line_that_is_too_long_ends_the_connection() {
    let case = Case::new(false);
    let socket = ControlSocket::open(&case.socket(), case.handler()).unwrap();
    let mut stream = UnixStream::connect(socket.path()).unwrap();
    stream.write_all(&vec![b' '; MAX_REQUEST_BYTES + 1]).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let answer = Answer::from_line(answer.as_bytes()).unwrap();
    assert!(refusal(&answer).1.contains("65536 bytes"), "{answer:?}");
}

#[test]
fn connections_are_bounded() {
    let case = Case::new(false);
    let socket = ControlSocket::open(&case.socket(), case.handler()).unwrap();
    let mut open: Vec<_> =
        (0..MAX_CONNECTIONS).map(|_| UnixStream::connect(socket.path()).unwrap()).collect();
    // They are accepted in order, so that the one too many comes last.
    let mut surplus = UnixStream::connect(socket.path()).unwrap();
    let mut nothing = Vec::new();
    assert_eq!(surplus.read_to_end(&mut nothing).unwrap(), 0);
    for stream in &mut open {
        stream.write_all(Request::Status(Scope::default()).to_line().as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        assert!(Answer::from_line(line.as_bytes()).is_some(), "{line}");
    }
}

#[test]
fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
    let case = Case::new(false);
    let path = case.socket();
    drop(UnixListener::bind(&path).unwrap());
    fs::write(case.folder.path().join("control.new"), "left behind").unwrap();
    let socket = ControlSocket::open(&path, case.handler()).unwrap();
    let second = ControlSocket::open(&path, case.handler()).unwrap_err();
    assert!(matches!(second, ListenError::InUse(_)) && second.to_string().contains("remedy"), "{second}");
    ask(&path, &Request::Status(Scope::default())).unwrap();
    // What has taken the name since is not ours to remove.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "other").unwrap();
    drop(socket);
    assert_eq!(fs::read_to_string(&path).unwrap(), "other");
    let file = ControlSocket::open(&path, case.handler()).unwrap_err();
    assert!(matches!(file, ListenError::NoSocket(_)), "{file}");
    let nowhere = ControlSocket::open(&case.folder.path().join("no/such"), case.handler()).unwrap_err();
    assert!(matches!(nowhere, ListenError::Refused { .. }), "{nowhere}");
}
