#!/usr/bin/env ruby
# The application in Ruby, with ruby-pg. README.md describes its commands.

require "json"
require "net/http"
require "pg"

# The same request can succeed later: lost connections, serialization failures and
# deadlocks, no resources, lock timeouts, shutdown and failover; IK409, the first request
# is in progress; IK410, another owner took the lease over, whose result a retry returns.
TRANSIENT = /\A(08|40|53|55P03|57P|58|25006|25P03|IK409|IK410)/

# The provider neither did nor refused what it was asked for.
class Unavailable < StandardError; end

def state(error)
  error.respond_to?(:result) ? error.result&.error_field(PG::Result::PG_DIAG_SQLSTATE) : nil
end

# Returns whether to try again. Without an SQLSTATE, the connection was lost or not made.
def transient?(error)
  state(error) ? state(error).match?(TRANSIENT) : error.is_a?(Unavailable) || error.is_a?(PG::ConnectionBad) || error.is_a?(PG::UnableToSend)
end

# Yields a new connection until the block succeeds, with growing pauses. Raises what is not
# transient, and after RETRY_SECONDS the last error. The block must begin with a claim of
# the same key: an attempt whose answer was lost might have committed.
def retrying
  now = -> { Process.clock_gettime(Process::CLOCK_MONOTONIC) }
  finish = now.call + Float(ENV.fetch("RETRY_SECONDS", 30))
  pause = 0.05
  begin
    connection = PG.connect
    yield connection
  rescue PG::Error, Unavailable => e
    raise if !transient?(e) || now.call + pause > finish

    connection&.close unless connection&.finished?
    connection = nil
    sleep(pause * rand(0.5..1.0))
    pause = [2 * pause, 2].min
    retry
  ensure
    connection&.close unless connection.nil? || connection.finished?
  end
end

# Charges a customer: key, charge and answer commit in one transaction.
def charge(key, customer, amount)
  retrying do |connection|
    connection.transaction do
      claim = connection.exec_params("SELECT replayed, response::text FROM idempotency.claim('charge', $1, $2)",
                                     [key, JSON.generate(customer: customer, amount: amount)])[0]
      next claim["response"] if claim["replayed"] == "t"

      made = connection.exec_params("INSERT INTO charge (customer, amount) VALUES ($1, $2) RETURNING id", [customer, amount])
      connection.exec_params("SELECT idempotency.complete('charge', $1, $2, 201)::text",
                             [key, JSON.generate(charge: made.getvalue(0, 0).to_i)]).getvalue(0, 0)
    end
  end
end

# Charges at the provider, which itself takes an idempotency key. Returns its charge, or nil
# if it refuses.
def ask_provider(key, amount)
  uri = URI("#{ENV.fetch('PROVIDER')}/charges")
  # Shorter than the lease, so that the owner does not lose it meanwhile.
  response = Net::HTTP.start(uri.host, uri.port, open_timeout: 5, read_timeout: 10, max_retries: 0) do |http|
    http.post(uri.path, JSON.generate(amount: amount), "Content-Type" => "application/json", "Idempotency-Key" => %("#{key}"))
  end
  raise Unavailable, "the provider answers #{response.code}" unless %w[201 402].include?(response.code)

  response.code == "201" ? JSON.parse(response.body)["id"] : nil
rescue SystemCallError, IOError, Timeout::Error, SocketError => e
  raise Unavailable, "the provider: #{e.message}"
end

# Orders an item, which the provider charges. No transaction is open meanwhile; a lease
# protects the order.
def order(key, item, amount)
  lease = ENV.fetch("LEASE", "30 seconds")
  retrying do |connection|
    claim = connection.exec_params(<<~SQL, [key, JSON.generate(item: item, amount: amount), lease])[0]
      SELECT replayed, response::text, token, idempotency.derive_key('order', $1, 'charge') AS provider_key, state ->> 'charge' AS charge
      FROM idempotency.claim('order', $1, $2, lease => $3)
    SQL
    next claim["response"] if claim["replayed"] == "t"

    begin
      # After a takeover, the former owner might have got as far as the checkpoint.
      charged = claim["charge"] || ask_provider(claim["provider_key"], amount)
    rescue Unavailable
      # The checkpoint keeps the request: the provider might have charged it.
      connection.exec_params("SELECT idempotency.checkpoint('order', $1, $2, 'asked'), idempotency.release('order', $1, $2)",
                             [key, claim["token"]])
      raise
    end
    if charged.nil?
      next connection.exec_params("SELECT idempotency.fail('order', $1, $2, 402, token => $3)::text",
                                  [key, JSON.generate(error: "card_declined"), claim["token"]]).getvalue(0, 0)
    end
    connection.exec_params("SELECT idempotency.checkpoint('order', $1, $2, 'charged', $3)",
                           [key, claim["token"], JSON.generate(charge: charged)])
    connection.transaction do
      # Refuses a former owner before it writes, and holds off a takeover until the commit.
      connection.exec_params("SELECT idempotency.renew('order', $1, $2, $3)", [key, claim["token"], lease])
      made = connection.exec_params("INSERT INTO purchase (item, amount, provider_charge) VALUES ($1, $2, $3) RETURNING id",
                                    [item, amount, charged])
      connection.exec_params("SELECT idempotency.complete('order', $1, $2, 201, token => $3)::text",
                             [key, JSON.generate(order: made.getvalue(0, 0).to_i), claim["token"]]).getvalue(0, 0)
    end
  end
end

# Handles a batch of messages that a queue delivers at least once: each has its effect once.
def consume(messages)
  ids = PG::TextEncoder::Array.new.encode(messages.map { |message| message["id"] })
  retrying do |connection|
    connection.transaction do
      new = connection.exec_params("SELECT * FROM idempotency.once_many('consumer', $1, '30 days')", [ids]).column_values(0)
      messages.each do |message|
        next unless new.delete(message["id"])

        connection.exec_params("INSERT INTO charge (customer, amount) VALUES ($1, $2)", message.values_at("customer", "amount"))
      end
    end
  end
  # Acknowledge after the commit: a batch that is lost before is delivered again.
  JSON.generate(acknowledged: messages.size)
end

begin
  command, key, name, amount = ARGV
  puts(command == "consume" ? consume($stdin.each_line.map { |line| JSON.parse(line) }) : send(command, key, name, Integer(amount)))
rescue PG::Error, Unavailable => e
  abort "#{state(e)}: #{e.message}"
end
