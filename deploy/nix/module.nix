# Culvert as a module of NixOS:
#
#   imports = [ /path/to/culvert/deploy/nix/module.nix ];
#   services.culvert = {
#     enable = true;
#     openFirewall = true;
#     settings.transport.listen = [ "0.0.0.0:4433" ];
#     settings.tun.address = [ "10.9.0.1/24" ];
#   };
#
# The unit is the package's own, with its sandbox. The key is made at the first start, outside the store; `culvert pubkey
# /etc/culvert/identity.key` prints its public half.
{ config, lib, pkgs, ... }:

let
  cfg = config.services.culvert;
  toml = pkgs.formats.toml { };
  key = "/etc/culvert/identity.key";
  port = address: lib.toInt (lib.last (lib.splitString ":" address));
in
{
  options.services.culvert = {
    enable = lib.mkEnableOption "Culvert, a tunnel gateway";

    package = lib.mkOption {
      type = lib.types.package;
      default = pkgs.callPackage ./package.nix { };
      defaultText = "pkgs.callPackage ./package.nix { }";
      description = "The package with the program and its unit.";
    };

    settings = lib.mkOption {
      type = toml.type;
      default = { };
      description = ''
        The configuration; culvert.toml(5) describes every key. It is in the store, where every user can read it: preshared keys
        belong into files (`preshared_key_file`).
      '';
    };

    openFirewall = lib.mkOption {
      type = lib.types.bool;
      default = false;
      description = "Whether to open the UDP ports of `settings.transport.listen`.";
    };
  };

  config = lib.mkIf cfg.enable {
    environment.systemPackages = [ cfg.package ];
    environment.etc."culvert/agent.toml".source =
      toml.generate "culvert.toml" (lib.recursiveUpdate { identity.key_file = key; } cfg.settings);

    users.users.culvert = {
      isSystemUser = true;
      group = "culvert";
      home = "/var/lib/culvert";
      description = "Culvert tunnel gateway";
    };
    users.groups.culvert = { };

    # The default size of limits.receive_buffer; a higher limit of another module stays.
    boot.kernel.sysctl."net.core.rmem_max" = lib.mkDefault 4194304;
    boot.kernel.sysctl."net.core.wmem_max" = lib.mkDefault 4194304;
    boot.kernelModules = lib.mkIf (cfg.settings ? tun) [ "tun" ];

    networking.firewall.allowedUDPPorts =
      lib.mkIf cfg.openFirewall (map port (cfg.settings.transport.listen or [ ]));

    systemd.packages = [ cfg.package ];
    systemd.services.culvert = {
      wantedBy = [ "multi-user.target" ];
      requires = [ "culvert-key.service" ];
      after = [ "culvert-key.service" ];
      reloadTriggers = [ config.environment.etc."culvert/agent.toml".source ];
    };
    systemd.services.culvert-key = {
      description = "Key of the Culvert tunnel gateway";
      unitConfig.ConditionPathExists = "!${key}";
      serviceConfig = {
        Type = "oneshot";
        UMask = "0077";
        ExecStart = "${cfg.package}/bin/culvert keygen --out ${key}";
      };
    };
  };
}
