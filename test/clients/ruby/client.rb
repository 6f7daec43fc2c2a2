# ruby-pg. It encodes each argument by to_s, so arrays and bytes take its encoders.
# play describes requests and replies.

require "json"
require "pg"

Session = Struct.new(:connection, :prepared, :names)

ARRAY = PG::TextEncoder::Array.new
SQL = {
  "begin" => "BEGIN", "commit" => "COMMIT", "rollback" => "ROLLBACK",
  "savepoint" => "SAVEPOINT s", "rollback to savepoint" => "ROLLBACK TO SAVEPOINT s"
}.freeze

# native returns an argument in the type in which an application has it.
def native(kind, value)
  case kind
  when "wrapped" then JSON.generate(value)
  when "interval" then "#{value} seconds"
  when "bytes" then { value: [value].pack("H*"), format: 1 }
  when "texts", "nullable texts", "UUIDs", "integers" then ARRAY.encode(value)
  else value
  end
end

# query runs a statement, prepared under a name of its own or not.
def query(session, sql, arguments)
  return session.connection.exec_params(sql, arguments) unless session.prepared

  session.names[sql] ||= "s#{session.names.size}".tap { |name| session.connection.prepare(name, sql) }
  session.connection.exec_prepared(session.names[sql], arguments)
end

# answer does what a request says, and returns the rows.
def answer(session, request)
  if SQL.key?(request["do"])
    session.connection.exec(SQL[request["do"]])
    return []
  end
  rows = query(session, request["sql"], request["arguments"].map { |kind, value| native(kind, value) }).values
  request["do"] == "query json" ? rows.map { |row| JSON.parse(row[0]) } : rows
end

sessions = Hash.new do |all, (name, host, prepared)|
  all[[name, host, prepared]] = Session.new(PG.connect(host: host), prepared, {})
end
$stdout.sync = true
$stdin.each_line do |line|
  request = JSON.parse(line)
  reply =
    begin
      { rows: answer(sessions[request.values_at("session", "host", "prepared")], request) }
    rescue PG::Error => e
      { error: e.result&.error_field(PG::Result::PG_DIAG_SQLSTATE) || "", message: e.message }
    rescue StandardError => e
      { error: "", message: "#{e.class}: #{e.message}" }
    end
  puts JSON.generate(reply)
end
